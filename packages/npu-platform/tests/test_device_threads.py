"""The size of the device's thread pool can change while it is in use."""

from __future__ import annotations

import pytest
import torch


def test_the_pool_shrinks_and_grows_and_keeps_computing() -> None:
    before = torch.npu.get_device_properties().multi_processor_count
    try:
        for threads in (3, 1, 4, 2):
            torch.npu.set_num_threads(threads)
            assert torch.npu.get_device_properties().multi_processor_count == threads
            x = torch.arange(1 << 16, dtype=torch.float32, device="npu")
            assert torch.equal((x * 2).cpu(), torch.arange(1 << 16, dtype=torch.float32) * 2)
    finally:
        torch.npu.set_num_threads(before)


def test_no_threads_are_refused() -> None:
    with pytest.raises(RuntimeError, match="at least 1 thread"):
        torch.npu.set_num_threads(0)
