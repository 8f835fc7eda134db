"""Which backend a layer gets, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.selector import AttentionSelectorConfig

from npu_platform.attention import registration
from npu_platform.attention.backend import NPUMetadataBuilder
from npu_platform.errors import UnsupportedFeatureError
from tests.support.vllm_process import run_program

NAMED_FIRST = """
from vllm.config import AttentionConfig
print("names:", *(AttentionConfig(backend=name).backend.get_class().get_name() for name in ("NPU_PAGED", "npu_mla")))
"""


def selector(**changes):
    values = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    return AttentionSelectorConfig(**values | changes)


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head"])
def test_cache_formats(cache):
    assert registration.select_backend(None, selector(kv_cache_dtype=cache)) == registration.BACKEND_CLASS


def test_a_configuration_may_name_a_backend_before_there_is_an_engine():
    # vLLM's own tests of proposers do; whoever follows the way out of a refusal in a script, too.
    done = subprocess.run([sys.executable, "-c", NAMED_FIRST], capture_output=True, text=True, check=False)
    assert "names: NPU_PAGED NPU_MLA" in done.stdout, done.stderr


THEIRS = """
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig
import torch
current_platform.device_name
from npu_platform.attention.backend import NPUPagedBackend
from npu_platform.attention.registration import select_backend
from vllm.v1.attention.backend import AttentionBackend
class Derived(NPUPagedBackend): ...
def select():
    return select_backend(None, AttentionSelectorConfig(64, torch.bfloat16, "auto", None))
register_backend(AttentionBackendEnum.NPU_PAGED, "__main__.Derived")
print("selected:", select())
register_backend(AttentionBackendEnum.NPU_PAGED, "vllm.v1.attention.backend.AttentionBackend")
try: select()
except Exception as error: print("refused:", error)
"""


def test_a_backend_that_takes_the_place_of_ours_in_vllms_registry():
    done = run_program(THEIRS)
    assert "selected: __main__.Derived\n" in done.stdout, done.stderr
    assert "refused: The attention backend registered as NPU_PAGED must be a subclass of" in done.stdout


def test_latent_attention_has_a_backend_of_its_own():
    latent = selector(use_mla=True, head_size=576, kv_cache_dtype="fp8")
    assert registration.select_backend(None, latent) == registration.MLA_BACKEND_CLASS


@pytest.mark.parametrize(
    "changes", [{"kv_cache_dtype": "fp8_e5m2"}, {"use_mla": True, "kv_cache_dtype": "int8_per_token_head"}]
)
def test_other_cache_formats_are_refused_by_name(changes):
    with pytest.raises(UnsupportedFeatureError, match="kv_cache_dtype"):
        registration.select_backend(None, selector(**changes))


def test_attention_that_is_causal_for_some_requests_only_is_refused():
    common = SimpleNamespace(causal=torch.tensor([True, False]))
    with pytest.raises(UnsupportedFeatureError, match="causal for some requests of a batch only"):
        NPUMetadataBuilder.build(SimpleNamespace(), 0, common)
