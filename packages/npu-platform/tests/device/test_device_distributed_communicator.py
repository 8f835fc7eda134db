"""vLLM's communicator on npu tensors: what its base class leaves out, between ranks that have different sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks

SETUP = """
from npu_platform.distributed.communicator import NPUCommunicator
communicator = NPUCommunicator(dist.group.WORLD, torch.device("npu", rank), dist.group.WORLD)
sizes = [3 * r + (r != 1) for r in range(size)]  # 1, 3, 7
rows = lambda r: torch.arange(float(2 * sizes[r]), device="npu").view(-1, 2) + 100 * r
every = torch.cat([rows(r) for r in range(size)])
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(3, tmp_path_factory.mktemp("ranks")) as started:
        started.run(SETUP)
        yield started


def test_sum_in_place(ranks: Ranks) -> None:
    ranks.run("""
x = torch.full((5,), rank + 1.0, device="npu")
assert communicator.all_reduce(x) is x
assert x.tolist() == [6.0] * 5
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    y = communicator.all_reduce(x + rank)
graph.replay()
assert y.tolist() == [21.0] * 5
""")


def test_sum_in_a_compiled_model(ranks: Ranks) -> None:
    ranks.run("""
compiled = torch.compile(lambda x: communicator.all_reduce(x * 2) + 1, fullgraph=True, backend="eager")
assert compiled(torch.full((5,), rank + 1.0, device="npu")).tolist() == [13.0] * 5
""")


def test_gather_along_each_dimension(ranks: Ranks) -> None:
    ranks.run("""
part = lambda r: torch.arange(6.0, device="npu").view(1, 2, 3) + 10 * r
for dim in (0, 1, 2, -1):
    gathered = communicator.all_gather(part(rank), dim)
    assert torch.equal(gathered, torch.cat([part(r) for r in range(size)], dim)) and gathered.is_contiguous()
assert torch.equal(communicator.all_gather(part(rank).transpose(1, 2), 0), torch.cat([part(r).transpose(1, 2) for r in range(size)]))
compiled = torch.compile(lambda x: communicator.all_gather(x * 2) + 1, fullgraph=True, backend="eager")
assert torch.equal(compiled(part(rank)), torch.cat([part(r) * 2 + 1 for r in range(size)], -1))
""")


def test_gather_of_large_pieces(ranks: Ranks) -> None:
    """As the logits of a batch: each piece goes into its place."""
    ranks.run("""
part = lambda r: torch.arange(5.0, device="npu").view(5, 1, 1) * torch.ones(1, 3, 1 << 14, device="npu") + 10 * r
for x in (part, lambda r: part(r).transpose(0, 1), lambda r: part(r)[:, 0]):
    for dim in (-1, 1):
        gathered = communicator.all_gather(x(rank), dim)
        assert torch.equal(gathered, torch.cat([x(r) for r in range(size)], dim)) and gathered.is_contiguous()
own = part(rank)[:, 0].contiguous()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    whole = communicator.all_gather(own)
for again in (0.0, 1.0):
    own += again
    graph.replay()
    assert torch.equal(whole, torch.cat([part(r)[:, 0] + again for r in range(size)], 1))
""")


def test_gather_between_hosts(ranks: Ranks) -> None:
    """gloo wants a place for the ranks' rows, one after the other; shared memory takes a place of any shape."""
    ranks.run("""
from npu_platform import _C
store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
gloo = lambda store, rank, size: dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=60))
between = NPUCommunicator(dist.group.WORLD, torch.device("npu", rank), dist.group.WORLD)
host = gloo(dist.PrefixStore("gloo", store), rank, size)
between._backend, refusal = _C.make_process_group(host, store, "abc"[rank], gloo)
assert "is on another host" in refusal
part = lambda r: torch.arange(6.0, device="npu").view(1, 2, 3) + 10 * r
for dim in (0, 1, -1):
    assert torch.equal(between.all_gather(part(rank), dim), torch.cat([part(r) for r in range(size)], dim))
large = lambda r: torch.arange(5.0, device="npu").view(5, 1) * torch.ones(1 << 15, device="npu") + 10 * r
assert torch.equal(between.all_gather(large(rank)), torch.cat([large(r) for r in range(size)], 1))
assert torch.equal(between.all_gatherv(rows(rank), 0, sizes), every)
""")


def test_gather_of_uneven_rows(ranks: Ranks) -> None:
    ranks.run("""
assert torch.equal(communicator.all_gatherv(rows(rank), 0, sizes), every)
one, two = communicator.all_gatherv([rows(rank), rows(rank).int()], 0, sizes)
assert torch.equal(one, every) and torch.equal(two, every.int())
even = communicator.all_gatherv(torch.full((2, 2), float(rank), device="npu"))
assert even[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
""")


def test_reduce_scatter_of_uneven_rows(ranks: Ranks) -> None:
    ranks.run("""
mine = communicator.reduce_scatterv(every * (rank + 1), 0, sizes)
assert torch.equal(mine, rows(rank) * 6), mine
even = communicator.reduce_scatterv(torch.ones(size, 2, device="npu"), 0)
assert even.tolist() == [[size, size]]
""")


def test_transfers_together(ranks: Ranks) -> None:
    """To the next rank as many rows as this one has, from the one before as many as that has."""
    ranks.run("""
after, before = (rank + 1) % size, (rank - 1) % size
came = torch.empty_like(rows(before))
communicator.batch_isend_irecv([dist.P2POp(dist.isend, rows(rank), after), dist.P2POp(dist.irecv, came, before)])
assert torch.equal(came, rows(before))
""")


def test_other_dimensions_are_refused(ranks: Ranks) -> None:
    ranks.start("communicator.all_gatherv(rows(rank), 1, sizes)")
    assert {reply.error for reply in ranks.replies()} == {
        "ValueError: all_gatherv works along dimension 0, not 1: move the dimension first."
    }
