from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from vllm.config import LoadConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from npu_platform import unsupported
from npu_platform.errors import UnsupportedFeatureError
from npu_platform.features import choose_loader, end_with_rotations, refuse_states_without_kernels


class LayerWithState(MambaBase):
    """A layer as vLLM's model modules define them."""

    def get_state_shape(self):
        return ((1,),)

    def get_state_dtype(self):
        return ()

    @property
    def mamba_type(self):
        return None


class LayerWithKernels(LayerWithState):
    has_npu_kernels = True


def test_layers_with_a_state_need_kernels(monkeypatch):
    refuse_states_without_kernels({"attention": object(), "mixer": LayerWithKernels()}, with_drafts=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    said = "kind LayerWithState run vLLM's Triton kernels, and VLLM_USE_V2_MODEL_RUNNER=0 leaves them out: set TRITON"
    with pytest.raises(UnsupportedFeatureError, match=said):
        refuse_states_without_kernels({"mixer": LayerWithKernels(), "other": LayerWithState()}, with_drafts=False)


class LayerThatRollsBack(LayerWithKernels):
    rolls_back = True


def test_drafts_need_states_that_roll_back():
    refuse_states_without_kernels({"mixer": LayerThatRollsBack()}, with_drafts=True)
    with pytest.raises(UnsupportedFeatureError, match="states of LayerWithKernels cannot be rolled back"):
        refuse_states_without_kernels({"mixer": LayerWithKernels(), "other": LayerThatRollsBack()}, with_drafts=True)


def asked_for(**more):
    """Speculation as vLLM's configuration has it, with the fields that are looked at."""
    plain = {"method": "ngram", "moe_backend": None, "enable_adaptive_verification": False, "dspark_draft_topk": None}
    plain |= {"rejection_sample_method": "standard", "num_speculative_tokens_per_batch_size": None}
    return SimpleNamespace(**plain | more)


@pytest.mark.parametrize("more", [{"rejection_sample_method": "fly"}, {"draft_lm_head_quantization": "fp8"}])
def test_what_only_vllm_0_33_has_is_refused(more):
    """Asked for as a user would, it would be a case of test_refusals.py; vLLM 0.32 does not know it."""
    assert list(unsupported._speculation(asked_for(**more))) == [
        "FLy and quantised heads of drafters are not there: leave out 'fly' and draft_lm_head_quantization."
    ]


def test_one_kernel_a_layer_is_refused_where_vllm_has_it():
    """Of vLLM 0.33 as well."""
    kernels = SimpleNamespace(linear_backend="auto", linear_backend_per_quant={})
    assert list(unsupported._kernels(kernels)) == []
    kernels.monokernel = True
    assert list(unsupported._kernels(kernels)) == ["One kernel a layer runs on AMD GPUs only: leave out --monokernel."]


def test_lookup_of_drafts_needs_numba_on_v1(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert list(unsupported._speculation(asked_for())) == [
        "Speculation by 'ngram' needs numba, which vLLM does not install without CUDA: pip install numba."
    ]


class LoaderOfAPlugin(DefaultModelLoader):
    """What a plugin registers under the name of its method of quantisation."""


def test_a_method_of_a_plugin_reads_its_checkpoints_by_its_own_loader():
    register_model_loader("method_of_a_plugin")(LoaderOfAPlugin)

    def chosen(method, load_format="auto"):
        model = SimpleNamespace(quantization=method)
        asked = SimpleNamespace(model_config=model, load_config=LoadConfig(load_format=load_format))
        choose_loader(asked)
        return asked.load_config.load_format

    assert chosen("method_of_a_plugin") == "method_of_a_plugin"
    assert chosen("method_of_a_plugin", "dummy") == "dummy"
    assert chosen("method_without_a_loader") == "auto"
    assert chosen("auto_gptq") == "auto"
    assert chosen(None) == "auto"


def test_what_the_plugin_for_bitsandbytes_cannot_do():
    """It is in no environment of the tests: these are the two of vllm-bnb-plugin 0.0.3 that ended in errors of torch."""

    def said(dtype, moe=False, **config):
        model = SimpleNamespace(dtype=dtype, is_moe=moe, hf_config=SimpleNamespace(quantization_config=config))
        return " ".join(unsupported._bitsandbytes(model))

    assert "pass --dtype bfloat16, or leave out --quantization" in said(torch.float32, load_in_4bit=True)
    assert said(torch.float32, load_in_8bit=True) == ""
    assert said(torch.bfloat16) == ""
    assert "leave out --quantization, or pass npu_int8" in said(torch.bfloat16, moe=True)


def test_a_length_that_nobody_named_ends_with_the_table_of_dynamic_rotations():
    """A named one is refused, which tests/integration/test_refusals.py asks for."""

    def length(asked, rope_type="dynamic", derived=1024):
        text = SimpleNamespace(rope_parameters={"rope_type": rope_type, "factor": 2.0}, max_position_embeddings=512)
        model = SimpleNamespace(hf_text_config=text, original_max_model_len=asked, max_model_len=asked or derived)
        end_with_rotations(SimpleNamespace(model_config=model))
        return model.max_model_len

    assert length(None) == 512
    assert length(None, derived=300) == 300
    assert length(None, rope_type="yarn") == 1024
    assert length(600) == 600
