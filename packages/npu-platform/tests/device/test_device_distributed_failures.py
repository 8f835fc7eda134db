"""Ranks that die, never come or lose each other: an error that names them, never a hang, and no use of the group after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .ranks import Ranks, Reply

# The groups' timeout is longer than any test may take, so that an error comes from noticing and not from waiting.
NEVER = 3600
COLLECTIVES = {
    "all_reduce": "dist.all_reduce(torch.ones(1024, device='npu'), group=group)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor("
    "torch.ones(8, device='npu'), torch.ones(4, device='npu'), group=group)",
    "broadcast": "dist.broadcast(torch.ones(4, device='npu'), 1, group=group)",
    "barrier": "group._get_backend(torch.device('npu')).barrier(dist.BarrierOptions()).wait()",
    "recv": "dist.recv(torch.ones(4, device='npu'), 1, group=group)",
    "all_to_all_single": "dist.all_to_all_single(torch.ones(4, device='npu'), torch.ones(4, device='npu'), group=group)",
}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(2, tmp_path, timeout=NEVER) as started:
        started.run("x = torch.ones(4, device='npu'); dist.all_reduce(x)")
        yield started


def failure(ranks: Ranks, rank: int = 0) -> str:
    """Return the error of the code that a rank runs; fails when it succeeds."""
    [reply] = ranks.replies([rank])
    assert isinstance(reply, Reply)
    assert reply.error is not None
    return reply.error


@pytest.mark.parametrize("waiting", ["all_reduce", "recv"])
def test_a_killed_rank_ends_the_wait(pair: Ranks, waiting: str) -> None:
    """Of the call under way, of every later one, and of those in other groups."""
    pair.run(
        f"groups = {{name: dist.new_group([0, 1], timeout=timedelta(seconds={NEVER})) for name in {[*COLLECTIVES]}}}"
    )
    pair.start(f"group = groups[{waiting!r}]; {COLLECTIVES[waiting]}", [0])
    pair.kill(1)
    check_dead(waiting, failure(pair), pair)
    for again in COLLECTIVES.values():
        pair.start(again, [0])
        assert f"this group can no longer be used: its {waiting} failed" in failure(pair)
    for collective, code in COLLECTIVES.items():
        if collective != waiting:
            pair.start(f"group = groups[{collective!r}]; {code}", [0])
            check_dead(collective, failure(pair), pair)
    pair.run("x = torch.ones(4, device='npu') + 1; assert x.tolist() == [2.0] * 4", [0])  # the device is as it was


def check_dead(collective: str, error: str, pair: Ranks) -> None:
    """Assert that the error says what failed, why, and what to do."""
    assert f"npuccl: {collective} on rank 0 of 2: " in error
    assert f"rank 1 (process {pair.processes[1].pid}) is dead" in error or "connection to another rank failed" in error
    assert "start them again" in error


def test_async_work_of_a_dead_rank_fails_at_each_wait(pair: Ranks) -> None:
    pair.kill(1)
    pair.start("work = dist.all_reduce(torch.ones(4, device='npu'), async_op=True); work.wait()", [0])
    assert "is dead" in failure(pair)
    pair.start("work.wait()", [0])
    assert "is dead" in failure(pair)


def test_a_rank_that_never_arrives_is_named_after_the_timeout(tmp_path: Path) -> None:
    with Ranks(3, tmp_path, timeout=2) as ranks:
        ranks.start("dist.all_reduce(torch.ones(4, device='npu'))", [0, 2])
        errors = [failure(ranks, 0), failure(ranks, 2)]
        assert any("timed out after 2000 ms: no sign of rank 1" in error for error in errors)
        assert all("timed out" in error or "given up this group" in error for error in errors)
        # The one that comes too late is told at once what happened.
        ranks.start("dist.all_reduce(torch.ones(4, device='npu'))", [1])
        assert "given up this group" in failure(ranks, 1) or "timed out" in failure(ranks, 1)


def test_a_call_has_a_timeout_of_its_own(pair: Ranks) -> None:
    pair.start(
        "options = dist.AllreduceOptions(); options.timeout = timedelta(seconds=1);"
        "dist.distributed_c10d._get_default_group().allreduce([torch.ones(4, device='npu')], options).wait()",
        [0],
    )
    assert "timed out after 1000 ms" in failure(pair)


def test_ranks_that_call_different_collectives_are_told(pair: Ranks) -> None:
    pair.start("dist.all_reduce(torch.ones(4, device='npu'))", [0])
    pair.start("dist.all_gather_into_tensor(torch.ones(8, device='npu'), torch.ones(4, device='npu'))", [1])
    errors = [failure(pair, 0), failure(pair, 1)]
    assert any("runs all_reduce of 16 bytes" in error and "same order" in error for error in errors)


def test_a_rank_that_leaves_is_named(pair: Ranks) -> None:
    pair.start("dist.all_reduce(torch.ones(4, device='npu'))", [0])
    pair.run("import gc; dist.destroy_process_group(); gc.collect()", [1])
    assert "rank 1" in (error := failure(pair))
    assert "has destroyed its group" in error


def test_a_graph_replayed_beside_a_dead_rank_fails(pair: Ranks) -> None:
    pair.run("""
x = torch.ones(4, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph): dist.all_reduce(x)
graph.replay()
""")
    pair.start("graph.replay()", [0])
    pair.kill(1)
    assert "is dead" in failure(pair)
    pair.start("graph.replay()", [0])
    assert "this group can no longer be used" in failure(pair)
