"""The fingerprint: equal for equal weights and layouts, wherever they lie, and for no others."""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from npu_kvconnector.errors import OptionError
from npu_kvconnector.fingerprint import SETTINGS, fingerprint, settings_digest, weights_digest
from tests.support import models, multimodal
from tests.support.offloading import offloading_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(random.Random(1).randbytes(3 << 20))
    return folder


def test_a_copy_of_the_weights_is_the_same_model(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "elsewhere")
    assert weights_digest(str(model)) == weights_digest(str(tmp_path / "elsewhere"))


def test_other_weights_of_the_same_shape_are_another_model(model: Path) -> None:
    before = weights_digest(str(model))
    (model / "model.safetensors").write_bytes(random.Random(2).randbytes(3 << 20))
    assert weights_digest(str(model)) != before


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_other_settings_are_another_model(name: str, model: Path) -> None:
    before = weights_digest(str(model))
    (model / name).write_text('{"rope_theta": 2}')
    assert weights_digest(str(model)) != before


def test_weights_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OptionError, match="set revision"):
        weights_digest("somebody/model")
    with pytest.raises(OptionError, match="set revision"):
        weights_digest(str(tmp_path))


def test_the_only_revision_in_the_cache_is_taken(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshots = tmp_path / "models--somebody--model" / "snapshots"
    shutil.copytree(model, snapshots / "abc")
    assert weights_digest("somebody/model") == weights_digest(str(model))
    shutil.copytree(model, snapshots / "def")
    with pytest.raises(OptionError, match="2 revisions"):
        weights_digest("somebody/model")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("cache", {"blocks_per_chunk": 2}),
        ("cache", {"tokens_per_hash": 32}),
        ("model", {"dtype": "float16"}),
        ("parallel", {"tp_size": 2, "world_size": 2}),
        (None, {"kv_cache_layout": "LBHNC"}),
        (None, {"replicated_layout": True}),
        (None, {"extra_config": {SETTINGS: "of another engine"}}),
    ],
)
def test_what_decides_the_bytes_is_in_it(part: str | None, change: dict[str, Any]) -> None:
    config = offloading_config()
    changed = dataclasses.replace(getattr(config, part), **change) if part else change
    other = dataclasses.replace(config, **({part: changed} if part else change))
    one, two = (fingerprint(each, block_bytes=4096, revision="r") for each in (config, other))
    assert one != two


def test_where_a_server_runs_is_not_in_it() -> None:
    config = offloading_config()
    other = dataclasses.replace(config, engine_id="another", extra_config={"cpu_bytes_to_use": 1 << 30})
    assert fingerprint(config, block_bytes=4096, revision="r") == fingerprint(other, block_bytes=4096, revision="r")
    assert fingerprint(config, block_bytes=8192, revision="r") != fingerprint(config, block_bytes=4096, revision="r")


DIGEST = """
import sys
from vllm.config import ModelConfig
from npu_kvconnector.fingerprint import settings_digest
print(settings_digest(ModelConfig(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32")))
"""


def test_how_an_engine_computes_is_in_it_wherever_the_model_lies(tmp_path: Path) -> None:
    from vllm.config import ModelConfig

    models.MAKERS["qwen3"](tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")

    def digest(folder: str = "model", quantization: str | None = None, **more: Any) -> str:
        model = ModelConfig(model=str(tmp_path / folder), **{"skip_tokenizer_init": True, "dtype": "float32"} | more)
        model.quantization = quantization  # without the device's consent, which wants kernels for it
        return settings_digest(model)

    stretched = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}
    others = [{"hf_overrides": stretched}, {"hf_overrides": {"rms_norm_eps": 0.5}}, {"dtype": "bfloat16"}]
    others.append({"quantization": "fp8"})
    assert len({digest(), *(digest(**other) for other in others)}) == len(others) + 1
    command = [sys.executable, "-c", DIGEST, str(tmp_path / "copy")]
    there = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert there.stdout.split()[-1] == digest()
    assert digest(max_model_len=64, seed=7, served_model_name="another") == digest()


def test_what_a_processor_is_told_of_images_is_in_it(tmp_path: Path) -> None:
    from vllm.config import ModelConfig

    multimodal.tiny_llava(tmp_path / "model")

    def digest(**options: Any) -> str:
        model = ModelConfig(model=str(tmp_path / "model"), dtype="float32", mm_processor_kwargs=options or None)
        return settings_digest(model)

    assert len({digest(), digest(do_normalize=False), digest(image_mean=[0.5, 0.5, 0.5])}) == 3
    assert digest(do_normalize=False) == digest(do_normalize=False)
