"""Several threads compute, allocate, capture and replay at once: right results, and everything is given back."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

DEVICE = "npu"
THREADS, ROUNDS = 4, 5
MIB = 1 << 20
WIDTH = 48


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.silu(F.linear(x, weight)) + x, (WIDTH,)).cumsum(-1)


class Captured:
    """Two layers in a graph whose input changes from replay to replay."""

    def __init__(self, weight: torch.Tensor, generator: torch.Generator, pool: tuple[int, int] | None) -> None:
        self.weight, self.generator = weight, generator
        self.input = torch.empty(4, WIDTH, device=DEVICE)
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph, pool=pool):
            self.result = self.eager()

    def eager(self) -> torch.Tensor:
        return layer(layer(self.input, self.weight), self.weight)

    def check(self) -> None:
        self.input.copy_(torch.randn(4, WIDTH, generator=self.generator))
        self.graph.replay()
        assert torch.equal(self.result, self.eager())


def work(seed: int, weight: torch.Tensor, pool: tuple[int, int], in_turn: threading.Lock) -> None:
    """Do one thread's share on a stream of its own. Graphs of one pool share memory: they are replayed in turn."""
    sizes, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    with torch.npu.stream(torch.npu.Stream()):
        own = Captured(weight, generator, None)
        with in_turn:
            sharing = Captured(weight, generator, pool)
        for _ in range(ROUNDS):
            held = [
                torch.full((sizes.randrange(1, MIB // 4),), seed, dtype=torch.uint8, device=DEVICE) for _ in range(3)
            ]
            own.check()
            with in_turn:
                sharing.check()
            trained = weight.detach().clone().requires_grad_()
            layer(own.input, trained).square().sum().backward()
            assert trained.grad is not None
            assert trained.grad.isfinite().all()
            assert all(tensor.eq(seed).all() for tensor in held)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def quick_garbage_collection() -> Iterator[None]:
    """Let collections look through what the test makes alone: each capture begins with one."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("quick_garbage_collection")
def test_threads_compute_capture_and_replay_and_leave_nothing() -> None:
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    base, resident, in_turn = torch.npu.memory_allocated(), [], threading.Lock()
    with ThreadPoolExecutor(THREADS) as threads:
        for repeat in range(4):
            pool = torch.npu.graph_pool_handle()
            for done in [threads.submit(work, repeat * THREADS + i, weight, pool, in_turn) for i in range(THREADS)]:
                done.result()
            del done
            gc.collect()
            torch.npu.empty_cache()
            assert torch.npu.memory_allocated() == base
            pools = {tuple(segment["segment_pool_id"]) for segment in torch.npu.memory_snapshot()}
            assert pools <= {(0, 0)}, "the pools of graphs are given back"
            resident.append(resident_bytes())
    assert resident[-1] - resident[1] < 8 * MIB, resident


def test_replays_of_one_graph_from_several_threads_follow_each_other() -> None:
    x = torch.zeros(1000, device=DEVICE)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(4):
            x.copy_(x + 1)  # a replay between the two launches would be lost
    x.zero_()
    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(graph.replay) for _ in range(100)]:
            done.result()
    assert x.eq(400).all()
