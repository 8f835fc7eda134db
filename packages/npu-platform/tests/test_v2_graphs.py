"""The V2 runner's graphs: of each kind one batch runs before its capture, and every graph is captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from npu_platform.v2.graphs import counting, once_before

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def decode(requests: int, tokens_each: int = 1, loras: int = 0) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(FULL, requests * tokens_each, requests, tokens_each, num_active_loras=loras)


def runs(descs: list[BatchExecutionDescriptor]) -> list[tuple[BatchExecutionDescriptor, bool]]:
    """Return what ran, and whether before a capture, when vLLM captures these."""
    seen: list[tuple[BatchExecutionDescriptor, bool]] = []

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
        return lambda _mode: seen.append((desc, warmup))

    factory: Any = once_before(create)
    for desc in descs:
        factory(desc, warmup=True)(NONE)
        factory(desc, warmup=False)(NONE)
    return seen


def test_sizes_of_a_kind_share_one_run_before() -> None:
    large, small, drafts = decode(8), decode(4), decode(4, tokens_each=3)
    adapters = decode(8, loras=1)
    assert runs([large, small, drafts, adapters]) == [
        (large, True),
        (large, False),
        (small, False),
        (drafts, True),
        (drafts, False),
        (adapters, True),
        (adapters, False),
    ]


def test_pieces_run_before_each_capture() -> None:
    """There vLLM captures with what it ran before."""
    descs = [BatchExecutionDescriptor(PIECEWISE, tokens, None) for tokens in (16, 8)]
    assert [desc for desc, before in runs(descs) if before] == descs


def test_full_graphs_know_how_many_rows_are_tokens(npu_ops: Any) -> None:
    """While they are captured, and then no more; a run before is of all rows."""
    tokens, told = torch.tensor([3], dtype=torch.int32, device="npu"), []

    def create(_desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
        return lambda _mode: told.append((warmup, rows_computed()))

    factory: Any = counting(create, tokens)
    for desc in (decode(8), BatchExecutionDescriptor(PIECEWISE, 8, None)):
        factory(desc, warmup=True)(NONE)
        factory(desc, warmup=False)(NONE)
    assert told == [(True, 8), (False, 3), (True, 8), (False, 8)]
    assert rows_computed() == 8


def rows_computed() -> int:
    """Return how many of eight rows a kernel writes."""
    x = torch.zeros(8, 16, device="npu")
    torch.ops.npu_ops.fused_add_rms_norm(x, torch.ones_like(x), torch.ones(16, device="npu"), 1e-6)
    return int((x[:, 0] != 0).sum())


def test_vllm_runs_what_the_factory_gives() -> None:
    source = inspect.getsource(CudaGraphManager.capture)
    for call in ("create_forward_fn(desc, warmup=True)", "create_forward_fn(desc, warmup=False)"):
        assert call in source
