"""Kernel launches: they are counted, and can be made for their allocations alone."""

from __future__ import annotations

import os
import threading

import pytest
import torch


def linear(rows: int = 64) -> torch.Tensor:
    x, weight = torch.ones(rows, 256, device="npu"), torch.ones(512, 256, device="npu")
    return torch.nn.functional.linear(x, weight)


def peak_bytes(skipped: tuple[str, ...]) -> int:
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    with torch.npu.skip_kernels(*skipped):
        linear()
    return torch.npu.max_memory_allocated() - before


@pytest.mark.skipif("NPU_DEBUG" in os.environ, reason="it reads freed memory, which NPU_DEBUG=memory overwrites")
def test_a_skipped_kernel_allocates_what_it_would_and_computes_nothing() -> None:
    with torch.npu.skip_kernels("aten::linear"):
        result = linear()
    assert result.shape == (64, 512)
    assert result.device.type == "npu"
    assert peak_bytes(()) == peak_bytes(("aten::linear",))
    x, weight = torch.full((4, 8), 3.0, device="npu"), torch.eye(8, device="npu")
    stale = torch.nn.functional.linear(x, weight)
    address = stale.data_ptr()
    stale.fill_(7.0)
    del stale
    with torch.npu.skip_kernels("aten::linear"):
        again = torch.nn.functional.linear(x, weight)
    assert again.data_ptr() == address, "the allocator gives the freed block again"
    assert torch.equal(again.cpu(), torch.full((4, 8), 7.0))


def test_skipping_ends_with_its_block_even_by_an_error() -> None:
    with pytest.raises(KeyError), torch.npu.skip_kernels("aten::linear"):
        raise KeyError
    assert torch.equal(linear().cpu(), torch.full((64, 512), 256.0))


def test_an_inner_block_replaces_the_outer_one_until_it_ends() -> None:
    x, eye = torch.full((4, 8), 3.0, device="npu"), torch.eye(8, device="npu")
    with torch.npu.skip_kernels("aten::linear"):
        with torch.npu.skip_kernels():
            assert torch.equal(torch.nn.functional.linear(x, eye).cpu(), x.cpu())
        torch.nn.functional.linear(x, eye).fill_(7.0)
        assert not torch.equal(torch.nn.functional.linear(x, eye).cpu(), x.cpu())


def test_other_threads_compute() -> None:
    results: list[torch.Tensor] = []
    with torch.npu.skip_kernels("aten::linear"):
        thread = threading.Thread(target=lambda: results.append(linear().cpu()))
        thread.start()
        thread.join()
    assert torch.equal(results[0], torch.full((64, 512), 256.0))


def test_ops_whose_kernel_allocates_cannot_be_skipped() -> None:
    with (
        pytest.raises(ValueError, match=r"'aten::mm' allocates inside its kernel"),
        torch.npu.skip_kernels("aten::mm"),
    ):
        pass
