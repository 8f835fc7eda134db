"""npu tensors to files and back, to other libraries and back: torch.save, safetensors, pickle, DLPack."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import dlpack

DEVICE = "npu"


def tensor() -> torch.Tensor:
    return torch.arange(12.0, device=DEVICE).view(3, 4)


@pytest.mark.parametrize(
    ("location", "device"),
    [
        (None, "npu:0"),
        ("npu", "npu:0"),
        ("npu:0", "npu:0"),
        (torch.device("npu"), "npu:0"),
        ("cpu", "cpu"),
        ({"npu:0": "cpu"}, "cpu"),
        (lambda storage, _where: storage, "cpu"),
        ("meta", "meta"),
    ],
)
def test_saved_tensors_load_where_they_are_wanted(location: object, device: str) -> None:
    saved = tensor()
    file = io.BytesIO()
    torch.save({"whole": saved, "row": saved[1], "parameter": torch.nn.Parameter(saved)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=location)
    assert {str(each.device) for each in loaded.values()} == {device}
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    if device != "meta":
        assert torch.equal(loaded["whole"].cpu(), saved.cpu())
        loaded["row"][0] = 77
        assert loaded["whole"][1, 0] == 77  # they still share a storage


def test_files_of_other_devices_load_to_npu(tmp_path: Path) -> None:
    file = tmp_path / "host.pt"
    torch.save(torch.ones(5), file)
    for options in ({}, {"mmap": True}):
        loaded = torch.load(file, map_location=DEVICE, **options)
        assert loaded.device == torch.device("npu:0")
        assert loaded.sum() == 5


def test_loading_to_a_device_that_is_not_there_is_refused() -> None:
    file = io.BytesIO()
    torch.save(tensor(), file)
    file.seek(0)
    with pytest.raises(RuntimeError, match="npu"):
        torch.load(file, map_location="npu:15")


def test_copies_and_pickles_stay_on_the_device() -> None:
    x = tensor()
    for again in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert again.device == x.device
        assert torch.equal(again, x)
        assert again.data_ptr() != x.data_ptr()


def test_safetensors_load_straight_to_npu(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    file = tmp_path / "weights.safetensors"
    tensors = {"x": tensor(), "half": torch.ones(2, 3, dtype=torch.bfloat16, device=DEVICE)}
    save_file(tensors, file)
    for name, loaded in load_file(file, device=DEVICE).items():
        assert loaded.device == torch.device("npu:0")
        assert loaded.dtype == tensors[name].dtype
        assert torch.equal(loaded, tensors[name])
    with safetensors.safe_open(file, "pt", device="npu:0") as opened:
        part = opened.get_slice("x")[1:, :2]
        assert part.device == torch.device("npu:0")
        assert part.tolist() == [[4, 5], [8, 9]]


def test_dlpack_shares_memory_between_libraries_of_the_device() -> None:
    x = tensor().t()
    shared = dlpack.from_dlpack(dlpack.to_dlpack(x))
    assert shared.device == x.device
    assert shared.stride() == x.stride()
    shared[0, 0] = 5
    assert x[0, 0] == 5
    held = torch.npu.memory_allocated()
    del x
    assert torch.npu.memory_allocated() == held  # the other side keeps it
    del shared
    assert torch.npu.memory_allocated() < held


def test_dlpack_copies_from_the_host_and_is_refused_by_the_host() -> None:
    host = np.ones(3, dtype=np.float32)
    copied = torch.from_dlpack(host, device=DEVICE)
    assert copied.device == torch.device("npu:0")
    host[0] = 7
    assert copied.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="Unsupported device"):
        np.from_dlpack(tensor())
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        np.asarray(tensor())


def test_dlpack_by_the_tensor_itself_still_has_no_name_for_renamed_devices() -> None:
    """PyTorch 2.13 compares with "privateuse1", the name before the rename; capsules of to_dlpack do not ask."""
    with pytest.raises(ValueError, match="Unknown device type npu for Dlpack"):
        torch.from_dlpack(tensor())
