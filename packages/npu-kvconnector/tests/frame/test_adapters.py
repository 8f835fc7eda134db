"""AdapterWeights: equal files are the same adapter wherever they lie, and others never are under one number."""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="adapters are vLLM's; install npu-kvconnector[vllm]")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request

from npu_kvconnector.compat import hear_of_adapters, salt_blocks
from npu_kvconnector.frame.adapters import AdapterWeights

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "adapter_config.json").write_text('{"r": 8}')
    (made / "adapter_model.safetensors").write_bytes(b"first weights")
    return made


class Workers:
    """Stands for an engine's workers, which load and remove whatever they are told to."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def add_lora(self, lora: LoRARequest) -> bool:
        assert isinstance(lora, LoRARequest)
        self.did.append("add")
        return True

    def remove_lora(self, number: int) -> bool:
        self.did.append("remove")
        return True


class MadeEngine(EngineCore):
    """An engine whose connector is made in its constructor, as vLLM's are."""

    def __init__(self, weights: AdapterWeights) -> None:
        self.model_executor = Workers()
        hear_of_adapters(weights.note_load, weights.note_removal)


def asked(folder: Path, number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest("name", number, str(folder), **more)


def write(folder: Path, weights: bytes) -> None:
    """Write weights of the same size, name and times in place of the old ones, as `rsync -t` may."""
    file = folder / "adapter_model.safetensors"
    times = file.stat()
    file.write_bytes(weights)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_copy_is_the_same_adapter(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    here, there = AdapterWeights().digest_of(asked(folder)), AdapterWeights().digest_of(asked(tmp_path / "elsewhere"))
    assert here == there
    assert here is not None


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_say_another_thing_are_another_adapter(name: str, folder: Path) -> None:
    weights = AdapterWeights()
    before = weights.digest_of(asked(folder))
    (folder / name).write_bytes(b"other weights")
    assert weights.digest_of(asked(folder, number=2)) not in {before, None}


def test_files_that_change_under_a_loaded_adapter_leave_its_weights_unknown(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    weights = AdapterWeights()
    first = weights.digest_of(asked(folder))
    write(folder, b"other weights")
    assert [weights.digest_of(asked(folder)) for _ in range(2)] == [None, None]
    assert caplog.text.count("have changed since it was loaded") == 1
    second = weights.digest_of(asked(folder, number=2))
    assert second not in {first, None}
    assert weights.digest_of(asked(folder)) is None
    write(folder, b"first weights")
    assert weights.digest_of(asked(folder)) == first
    assert weights.digest_of(asked(folder, number=2)) is None


def test_an_adapter_loaded_in_place_has_its_new_weights(folder: Path) -> None:
    weights = AdapterWeights()
    first = weights.digest_of(asked(folder))
    write(folder, b"other weights")
    second = weights.digest_of(asked(folder, load_inplace=True))
    assert second not in {first, None}
    assert weights.digest_of(asked(folder)) == second


def test_an_adapter_has_the_weights_that_were_there_when_it_was_loaded(folder: Path) -> None:
    """Not those of its first request, before which its files may have changed."""
    weights, others = AdapterWeights(), AdapterWeights()
    first = others.digest_of(asked(folder))
    engine = MadeEngine(weights)
    assert engine.add_lora(*EngineCoreProc._convert_msgspec_args(engine.add_lora, [["name", 1, str(folder)]]))
    assert engine.add_lora(asked(folder))
    write(folder, b"other weights")
    assert weights.digest_of(asked(folder)) is None
    assert engine.add_lora(asked(folder, load_inplace=True))
    second = weights.digest_of(asked(folder))
    assert second not in {first, None}
    write(folder, b"first weights")
    assert engine.remove_lora(1)
    assert weights.digest_of(asked(folder)) == first
    assert engine.model_executor.did == ["add", "add", "add", "remove"]


def test_an_engine_goes_when_nobody_has_it(folder: Path) -> None:
    engine = MadeEngine(AdapterWeights())
    gone = weakref.ref(engine)
    del engine
    assert gone() is None


def test_a_number_used_for_another_folder_leaves_its_weights_unknown(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    weights = AdapterWeights()
    first = weights.digest_of(asked(folder))
    assert weights.digest_of(asked(tmp_path / "other")) == first
    write(tmp_path / "other", b"other weights")
    assert weights.digest_of(asked(tmp_path / "other")) is None


def test_an_adapter_that_is_not_there_has_no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    assert AdapterWeights().digest_of(asked(folder)) is None


def test_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = AdapterWeights()
    first = weights.digest_of(asked(folder))
    monkeypatch.setattr("npu_kvconnector.frame.adapters.hashlib.file_digest", None)
    assert weights.digest_of(asked(folder)) == first


def hashes(salt: str | None, more: str | None, lora: LoRARequest | None = None) -> list[bytes]:
    """Return the names of a request's blocks of four tokens, by its user's salt and by ours."""
    init_none_hash(sha256)
    request = Request(
        "request",
        list(range(9)),
        SamplingParams(max_tokens=1),
        None,
        cache_salt=salt,
        lora_request=lora,
        block_hasher=get_request_block_hasher(4, sha256),
    )
    if more is not None:
        salt_blocks(request, more)
    return list(request.block_hashes)


def test_salts_of_users_and_ours_are_told_apart() -> None:
    found = [hashes(salt, more) for salt in (None, "mine", "yours") for more in (None, "adapter 1", "adapter 2")]
    assert all(len(names) == 2 for names in found)
    assert len({name for names in found for name in names}) == 18
    assert hashes("mine", "adapter 1") == hashes("mine", "adapter 1")


def test_vllm_does_not_tell_blocks_of_other_weights_apart(folder: Path) -> None:
    before = hashes(None, None, asked(folder))
    write(folder, b"other weights")
    assert hashes(None, None, asked(folder)) == before, "salt_blocks is no longer needed"
