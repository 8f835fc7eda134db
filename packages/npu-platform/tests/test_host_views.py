"""A tensor of the device in pinned memory of the host is that memory, and holds none of the device's."""

from __future__ import annotations

import gc

import pytest
import torch

from npu_platform.host_views import device_view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_view_is_the_same_memory(dtype: torch.dtype) -> None:
    host = (torch.arange(24).view(4, 6) % 5).to(dtype).pin_memory()
    held = torch.npu.memory_allocated()
    view = device_view(host)
    assert (view.device, view.dtype, view.stride()) == (torch.device("npu", 0), dtype, host.stride())
    assert (view.data_ptr(), torch.npu.memory_allocated()) == (host.data_ptr(), held)
    assert torch.equal(view.cpu().float(), host.float())


def test_kernels_read_and_write_it() -> None:
    host = torch.arange(6.0).view(2, 3).pin_memory()
    view = device_view(host.t())
    assert view.stride() == (1, 3)
    assert (view @ torch.ones(2, 1, device="npu")).tolist() == [[3.0], [5.0], [7.0]]
    view.add_(1)
    torch.npu.synchronize()
    assert host.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_the_memory_lives_as_long_as_the_view() -> None:
    view = device_view(torch.full((1 << 16,), 7.0).pin_memory())
    gc.collect()
    others = [torch.zeros(1 << 16).pin_memory() for _ in range(4)]
    assert view.sum().item() == 7 << 16
    assert all(other.data_ptr() != view.data_ptr() for other in others)


def test_part_of_a_tensor_and_nothing() -> None:
    host = torch.arange(10).pin_memory()
    assert device_view(host[3:7]).tolist() == [3, 4, 5, 6]
    assert device_view(torch.empty(0, 3)).shape == (0, 3)


def test_memory_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(ValueError, match="call pin_memory"):
        device_view(torch.ones(3))
