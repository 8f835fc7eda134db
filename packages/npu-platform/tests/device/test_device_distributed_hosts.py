"""Groups over several hosts, here with made up names: an all-reduce goes through each host's memory, and between their first ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks

# The default group is on one host; `backend` is one over two hosts of two ranks and of one.
SETUP = """
from npu_platform import _C
store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
made = []
def gloo(store, rank, size):
    made.append((rank, size))
    return dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=60))
host = gloo(dist.PrefixStore("gloo", store), rank, size)
backend, refusal = _C.make_process_group(host, store, "abc"[rank // 2], gloo)
def all_reduce(x, op=dist.ReduceOp.SUM):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    backend.allreduce([x], options).wait()
    return x
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(3, tmp_path_factory.mktemp("hosts")) as started:
        started.run(SETUP)
        yield started


def test_first_ranks_of_hosts_have_a_backend_between_them(ranks: Ranks) -> None:
    of_all = [[0, 3], [1, 3], [2, 3]]
    assert ranks.run("value = made") == [[of_all[0], [0, 2]], [of_all[1]], [of_all[2], [1, 2]]]
    assert ranks.run("value = refusal") == ["rank 2 is on another host than rank 0 (b; a)"] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("n", [0, 1, 5, 1 << 18])
def test_all_reduce_is_over_all_hosts(ranks: Ranks, dtype: str, n: int) -> None:
    ranks.run(f"""
source = torch.arange({n}, device="npu").remainder(50)
x = all_reduce((source * (rank + 1)).to(torch.{dtype}))
assert torch.equal(x, (source * 6).to(torch.{dtype}))
assert torch.equal(all_reduce(source + rank, dist.ReduceOp.MAX), source + 2)
""")


def test_averages_truths_and_several_at_once(ranks: Ranks) -> None:
    ranks.run("""
assert all_reduce(torch.full((3,), float(rank), device="npu"), dist.ReduceOp.AVG).tolist() == [1.0] * 3
assert all_reduce(torch.tensor([rank == 2, False], device="npu")).tolist() == [True, False]
both = [torch.full((n,), rank + 1, device="npu") for n in (2, 5)]
backend.allreduce_coalesced(both).wait()
assert [x.tolist() for x in both] == [[6] * 2, [6] * 5]
""")


def test_a_replay_reduces_again(ranks: Ranks) -> None:
    ranks.run("""
source = torch.arange(9.0, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    y = source * (rank + 1)
    backend.allreduce([y])
    last = y + 1
for step in range(4):
    source.fill_(step)
    graph.replay()
    assert last.tolist() == [6.0 * step + 1] * 9
""")


def test_ranks_beside_a_dead_one_and_on_the_other_host_are_told(ranks: Ranks) -> None:
    """The last test of the module: it ends the group."""
    ranks.kill(2)
    ranks.start("all_reduce(torch.ones(4, device='npu'))", [0, 1])
    first, second = ranks.replies([0, 1])
    assert first.error is not None
    assert second.error is not None
    assert "This group can no longer be used" in first.error
    assert "has met an error and given up this group" in second.error
