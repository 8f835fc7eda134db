"""Collectives in graphs: a replay runs them again, with the others and with new inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("graphs")) as started:
        yield started


@pytest.mark.parametrize(
    ("setup", "collective", "expected"),
    [
        ("", "dist.all_reduce(y); out = y", "3 * source"),
        ("", "dist.all_reduce(y, async_op=True).wait(); out = y", "3 * source"),
        ("", "dist.broadcast(y, 1); out = y", "2 * source"),
        (
            "out = torch.empty(2 * n, device='npu')",
            "dist.all_gather_into_tensor(out, y)",
            "torch.cat([source, 2 * source])",
        ),
        (
            "out = torch.empty(n // 2, device='npu')",
            "dist.reduce_scatter_tensor(out, y)",
            "3 * source[rank * n // 2 : (rank + 1) * n // 2]",
        ),
        # Over gloo.
        (
            "out = torch.empty(n, device='npu')",
            "dist.all_to_all_single(out, y)",
            "torch.cat([(r + 1) * source[rank * n // 2 : (rank + 1) * n // 2] for r in range(2)])",
        ),
    ],
    ids=["all_reduce", "async", "broadcast", "all_gather", "reduce_scatter", "all_to_all"],
)
@pytest.mark.parametrize("n", [6, 1 << 18])
def test_a_replay_runs_the_collective_again(pair: Ranks, setup: str, collective: str, expected: str, n: int) -> None:
    pair.run(f"""
n = {n}
source = torch.arange(n, dtype=torch.float32, device="npu")
{setup}
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    y = source * (rank + 1)
    {collective}
    last = out + 1
for step in range(5):
    source.copy_(torch.arange(n, dtype=torch.float32) + 100 * step)
    graph.replay()
    assert torch.equal(last, {expected} + 1), step
""")


def test_many_replays_stay_in_step(pair: Ranks) -> None:
    """As in decoding: graphs of several collectives each, replayed in turn, eager collectives between them."""
    pair.run("""
x = torch.zeros(2048, dtype=torch.bfloat16, device="npu")
graphs = []
for depth in (1, 4):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(depth):
            x.add_(rank)
            dist.all_reduce(x)
            x.mul_(0.5)
    graphs.append(graph)
for step in range(200):
    x.zero_()
    graphs[step % 2].replay()
    expected = [0.5, 2.0][step % 2]
    assert (x == expected).all(), (step, x[0])
    total = torch.full((3,), float(step), device="npu")
    dist.all_reduce(total)
    assert total.tolist() == [2.0 * step] * 3
""")


def test_a_replay_outlives_the_tensors_of_the_capture(pair: Ranks) -> None:
    """The graph owns what its collectives touch."""
    pair.run("""
import gc
x = torch.ones(1000, device="npu")
result = torch.zeros(1000, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    dist.all_reduce(x)
    result.copy_(x)
del x
gc.collect()
fill = [torch.full((1000,), 9.0, device="npu") for _ in range(20)]
graph.replay()
assert (result == 4).all(), result[0]
assert all((t == 9).all() for t in fill)
""")
