"""Collectives through shared memory: equal to a plain reference, bit for bit, over ops, dtypes, sizes and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .ranks import Ranks

# Every rank can make every rank's input, so that it computes what it must get without asking.
HELPERS = """
import torch

def inputs_of(seed, count, dtype):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [(torch.randn(count, generator=generator) * 3).to(dtype) for _ in range(size)]
    low, high = (0, 2) if dtype == torch.bool else (0, 256) if dtype == torch.uint8 else (-128, 128)
    return [torch.randint(low, high, (count,), generator=generator).to(dtype) for _ in range(size)]

def reduced(inputs, op):
    dtype = inputs[0].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    total = inputs[0].float() if half else inputs[0].clone()
    for other in inputs[1:]:
        other = other.float() if half else other
        match op:
            case "SUM" | "AVG": total = total | other if dtype == torch.bool else total + other
            case "PRODUCT": total = total & other if dtype == torch.bool else total * other
            case "MIN": total = torch.minimum(total, other)
            case "MAX": total = torch.maximum(total, other)
            case "BAND": total = total & other
            case "BOR": total = total | other
            case "BXOR": total = total ^ other
    if op == "AVG": total = total / size
    return total.to(dtype)

def check(actual, expected):
    assert actual.device.type == "npu"
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)

def all_reduce(seed, count, dtype, op, root):
    inputs = inputs_of(seed, count, dtype)
    x = inputs[rank].to("npu")
    work = dist.all_reduce(x, op=getattr(dist.ReduceOp, op), async_op=seed % 3 == 0)
    if work: work.wait()
    check(x, reduced(inputs, op))

def reduce(seed, count, dtype, op, root):
    inputs = inputs_of(seed, count, dtype)
    x = inputs[rank].to("npu")
    dist.reduce(x, root, op=getattr(dist.ReduceOp, op))
    if rank == root: check(x, reduced(inputs, op))

def reduce_scatter(seed, count, dtype, op, root):
    inputs = inputs_of(seed, count * size, dtype)
    x = torch.empty(count, dtype=dtype, device="npu")
    expected = reduced(inputs, op)[rank * count : (rank + 1) * count]
    dist.reduce_scatter_tensor(x, inputs[rank].to("npu"), op=getattr(dist.ReduceOp, op))
    check(x, expected)
    x.zero_()
    parts = [part.contiguous() for part in inputs[rank].to("npu").split(count)] if count else [x] * size
    dist.reduce_scatter(x, parts, op=getattr(dist.ReduceOp, op))
    check(x, expected)

def all_gather(seed, count, dtype, op, root):
    inputs = inputs_of(seed, count, dtype)
    x = torch.empty(count * size, dtype=dtype, device="npu")
    dist.all_gather_into_tensor(x, inputs[rank].to("npu"))
    check(x, torch.cat(inputs))
    # Lists may be of different lengths.
    inputs = [each[: max(0, count - 7 * r)] for r, each in enumerate(inputs)]
    parts = [torch.empty_like(each, device="npu") for each in inputs]
    dist.all_gather(parts, inputs[rank].to("npu"))
    for part, each in zip(parts, inputs, strict=True): check(part, each)

def broadcast(seed, count, dtype, op, root):
    inputs = inputs_of(seed, count, dtype)
    x = inputs[rank].to("npu")
    dist.broadcast(x, root)
    check(x, inputs[root])

def gather_scatter(seed, count, dtype, op, root):
    inputs = inputs_of(seed, count, dtype)
    mine = inputs[rank].to("npu")
    parts = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
    dist.gather(mine, parts, dst=root)
    if rank == root:
        for part, each in zip(parts, inputs, strict=True): check(part, each)
    x = torch.empty_like(mine)
    dist.scatter(x, [each.to("npu") for each in inputs] if rank == root else None, src=root)
    check(x, inputs[rank])
    dist.group.WORLD._get_backend(torch.device("npu")).barrier(dist.BarrierOptions()).wait()

def all_to_all(seed, count, dtype, op, root):
    # Rank r has a part of its own length for each other rank, some of them empty.
    length = lambda one, other: max(0, count - 13 * (one + 2 * other))
    inputs = [each.split([length(r, other) for other in range(size)])
              for r, each in enumerate(inputs_of(seed, count * size, dtype)) for each in [each[:sum(length(r, o) for o in range(size))]]]
    mine = [part.to("npu") for part in inputs[rank]]
    expected = [each[rank] for each in inputs]
    parts = [torch.empty_like(each, device="npu") for each in expected]
    work = dist.all_to_all(parts, mine, async_op=seed % 3 == 0)
    if work: work.wait()
    for part, each in zip(parts, expected, strict=True): check(part, each)
    out = torch.empty(sum(map(len, expected)), dtype=dtype, device="npu")
    dist.all_to_all_single(out, torch.cat(mine), [*map(len, expected)], [*map(len, mine)])
    check(out, torch.cat(expected))
"""

FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["int8", "uint8", "int32", "int64", "bool"]
SLOT = 1 << 20  # bytes a rank can contribute at once
WITH_SIZES = 1 << 16  # bytes of each part of an all-to-all that go with the sizes
# Around the edges of the vector loops, of their blocks and of the slots.
COUNTS = st.one_of(
    st.integers(0, 40),
    st.integers(500, 1100),
    st.sampled_from([WITH_SIZES // 4, WITH_SIZES // 2 + 14, SLOT // 8, SLOT // 2, SLOT // 2 + 1, SLOT + 5]),
)
CASES = st.one_of(
    st.tuples(st.sampled_from(FLOATS), st.sampled_from(["SUM", "AVG", "PRODUCT", "MIN", "MAX"])),
    st.tuples(st.sampled_from(INTEGERS), st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])),
)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(request.param, tmp_path_factory.mktemp("ranks")) as started:
        started.run(HELPERS)
        yield started


@pytest.mark.parametrize(
    "collective", ["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "gather_scatter", "all_to_all"]
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES, count=COUNTS, seed=st.integers(0, 1000), root=st.integers(0, 1))
def test_collectives_equal_the_reference(
    ranks: Ranks, collective: str, case: tuple[str, str], count: int, seed: int, root: int
) -> None:
    dtype, op = case
    ranks.run(f"{collective}({seed}, {count}, torch.{dtype}, {op!r}, {root})")


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
def test_rare_values_are_reduced_as_others(ranks: Ranks, op: str) -> None:
    """Every bfloat16 with every few others: subnormals, infinities, zeros of both signs; no more is asked of what is no number."""
    ranks.run(f"""
every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
inputs = [every.roll(r * 12345) for r in range(size)]
x = inputs[rank].to("npu")
dist.all_reduce(x, op=dist.ReduceOp.{op})
expected = reduced(inputs, {op!r})
numbers = ~expected.isnan()
assert torch.equal(x.cpu().isnan(), expected.isnan())
assert torch.equal(x.cpu()[numbers].view(torch.int16), expected[numbers].view(torch.int16))
""")


def test_the_memory_has_no_name(ranks: Ranks) -> None:
    """Nothing to leave behind: the segment is an anonymous file that the ranks have mapped."""
    for maps in ranks.run("value = open('/proc/self/maps').read()"):
        assert "memfd:npuccl" in maps
        assert "/dev/shm" not in maps


def test_nothing_stays_after_the_group(tmp_path: Path) -> None:
    """Destroyed and killed ranks leave no mapping, no descriptor and no file."""
    before = set(Path("/dev/shm").iterdir())
    with Ranks(2, tmp_path) as ranks:
        ranks.run("x = torch.ones(8, device='npu'); dist.all_reduce(x)")
        ranks.run(STILL_OPEN)
        assert ranks.run("value = still_open()") == [[], []]
    killed = tmp_path / "killed"
    killed.mkdir()
    with Ranks(2, killed) as ranks:
        ranks.run("x = torch.ones(8, device='npu'); dist.all_reduce(x)")
        ranks.kill(0)
        ranks.kill(1)
    assert not [file for file in set(Path("/dev/shm").iterdir()) - before if "npu" in file.name]


STILL_OPEN = """
import gc, os
dist.destroy_process_group()
gc.collect()

def still_open():
    links = []
    for number in os.listdir("/proc/self/fd"):
        try: links.append(os.readlink("/proc/self/fd/" + number))
        except FileNotFoundError: pass  # the listing's own
    return [link for link in links + open("/proc/self/maps").read().split() if "npuccl" in link or "pidfd" in link]
"""


def test_ranks_of_different_hosts_use_gloo(ranks: Ranks) -> None:
    """The same backend over gloo: what the hosts' names decide, here with made up ones."""
    if len(ranks.processes) != 2:
        pytest.skip("two ranks are enough")
    refusals = ranks.run("""
from npu_platform import _C
store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
host = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size)
backend, value = _C.make_process_group(host, store, "host-" + str(rank), dist.ProcessGroupGloo)
""")
    assert refusals == ["rank 1 is on another host than rank 0 (host-1; host-0)"] * 2
    ranks.run("""
def sum_of(op, dtype):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    x = torch.full((5,), rank + 1, device="npu").to(dtype)
    backend.allreduce([x], options).wait()
    return x.tolist()
assert sum_of(dist.ReduceOp.SUM, torch.bfloat16) == [3.0] * 5
assert sum_of(dist.ReduceOp.AVG, torch.float32) == [1.5] * 5
assert sum_of(dist.ReduceOp.SUM, torch.bool) == [True] * 5
work = backend.allreduce([torch.ones(1, device="npu")])
assert [x.tolist() for x in work.get_future().wait()] == [[2.0]]
""")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("dist.all_reduce(torch.ones(4, 4, device='npu').t()[1:])", "needs contiguous tensors"),
        ("dist.all_reduce(torch.ones(4, device='npu', dtype=torch.int16))", "cannot reduce Short; convert it to"),
        ("dist.all_reduce(torch.ones(4, device='npu'), op=dist.ReduceOp.BXOR)", "bitwise ops are for integers"),
        ("dist.all_reduce(torch.ones(4, device='npu', dtype=torch.int32), op=dist.ReduceOp.AVG)", "cannot average Int"),
        ("dist.all_gather([torch.ones(4, device='npu')], torch.ones(4, device='npu'))", "tensors, one a rank, not 1"),
        (
            "dist.all_gather_into_tensor(torch.ones(4, device='npu'), torch.ones(4, device='npu'))",
            "ranks needs one tensor",
        ),
    ],
)
def test_wrong_arguments_are_refused_and_harm_nothing(ranks: Ranks, code: str, message: str) -> None:
    ranks.start(code)
    for reply in ranks.replies():
        assert reply.error is not None
        assert message in reply.error
    ranks.run("x = torch.ones(3, device='npu'); dist.all_reduce(x); assert x.tolist() == [size] * 3")


def test_async_work_keeps_its_order_and_its_memory(ranks: Ranks) -> None:
    ranks.run("""
xs = [torch.full((1000 * n,), rank + 1.0, device="npu") for n in range(1, 20)]
works = [dist.all_reduce(x, async_op=True) for x in xs]
last = torch.ones(3, device="npu")
dist.all_reduce(last)  # waits for its turn
total = size * (size + 1) / 2
assert last.tolist() == [size] * 3
for x, work in zip(xs, works, strict=True):
    assert work.wait() and work.is_completed() and work.is_success()
    assert (x == total).all()
future = dist.all_reduce(torch.ones(2, device="npu"), async_op=True).get_future()
assert [x.tolist() for x in future.wait()] == [[size, size]]
assert dist.all_reduce(torch.ones(2, device="npu"), async_op=True).get_future().then(lambda f: 7).wait() == 7
""")


def test_who_is_told_of_a_result_may_ask_for_collectives(ranks: Ranks) -> None:
    """As DDP's hooks that compress gradients do, on the thread that runs what is queued."""
    ranks.run("""
def ask(future):
    now = torch.ones(3, device="npu")
    dist.all_reduce(now)
    return [now, *dist.all_reduce(torch.ones(3, device="npu"), async_op=True).get_future().wait()]
dist.all_reduce(torch.ones(1 << 22, device="npu"), async_op=True)  # so that the others are queued
told = dist.all_reduce(torch.ones(3, device="npu"), async_op=True).get_future().then(ask)
dist.all_reduce(last := torch.ones(3, device="npu"), async_op=True)  # alike, so that ranks may differ in their order
assert [x.tolist() for x in told.wait()] == [[size] * 3] * 2
dist.all_reduce(torch.ones(3, device="npu"))
assert last.tolist() == [size] * 3
""")


def test_the_thread_of_async_work_sleeps_through_other_work(ranks: Ranks) -> None:
    """Woken by each collective of a model's layers it would take the rank's core from the rank."""
    ranks.run("""
import os
from pathlib import Path
group = dist.new_group(range(size))
x = torch.ones(4, device="npu")
dist.all_reduce(x, group=group)
before = set(os.listdir("/proc/self/task"))
dist.all_reduce(x, group=group, async_op=True).wait()
started = set(os.listdir("/proc/self/task")) - before
assert len(started) == 1
status = Path("/proc/self/task", *started, "status")
dist.all_reduce(x, group=group)  # it sleeps by then, or it will after another one
times_asleep = lambda: int(status.read_text().split("voluntary_ctxt_switches:")[1].split()[0])
first = times_asleep()
for _ in range(300): dist.all_reduce(x, group=group)
assert times_asleep() <= first + 1
""")


def test_groups_work_in_any_order(ranks: Ranks) -> None:
    """Ranks start asynchronous collectives of two groups in opposite orders."""
    ranks.run("""
one, two = dist.new_group(range(size)), dist.new_group(range(size))
x, y = torch.ones(4, device="npu"), torch.full((4,), 2.0, device="npu")
pairs = [(x, one), (y, two)]
works = [dist.all_reduce(t, group=g, async_op=True) for t, g in (pairs if rank else reversed(pairs))]
for work in works: work.wait()
assert (x == size).all() and (y == 2 * size).all()
""")


def test_coalesced_collectives(ranks: Ranks) -> None:
    """Several tensors in one call, of several shapes."""
    ranks.run("""
import warnings
import torch.distributed._functional_collectives as functional
warnings.simplefilter("ignore")
total = size * (size + 1) / 2
a, b = torch.full((5,), rank + 1.0, device="npu"), torch.full((2, 3), 10.0 * (rank + 1), device="npu")
x, y = a.clone(), b.clone()
dist.all_reduce_coalesced([x, y])
assert (x == total).all() and (y == 10 * total).all()
lists = [[torch.empty_like(a), torch.empty_like(b)] for _ in range(size)]
dist.all_gather_coalesced(lists, [a, b])
assert all((x == r + 1).all() and (y == 10 * (r + 1)).all() for r, (x, y) in enumerate(lists))
x, y = functional.all_gather_into_tensor_coalesced([a, b], dist.group.WORLD)
assert x.shape == (5 * size,) and y.shape == (2 * size, 3)
assert all((x[5 * r : 5 * r + 5] == r + 1).all() and (y[2 * r : 2 * r + 2] == 10 * (r + 1)).all() for r in range(size))
x, y = functional.reduce_scatter_tensor_coalesced([a.repeat(size), b.repeat(size, 1)], "sum", [0, 0], dist.group.WORLD)
assert (x == total).all() and x.shape == (5,) and (y == 10 * total).all() and y.shape == (2, 3)
""")


def test_all_to_all_of_uneven_parts(ranks: Ranks) -> None:
    """Rank r sends s + 1 elements to rank s, each its own number."""
    ranks.run("""
lengths = list(range(1, size + 1))
source = 100.0 * rank + torch.arange(float(sum(lengths)), device="npu")
mine = [[100.0 * r + sum(lengths[:rank]) + i for i in range(rank + 1)] for r in range(size)]
out = torch.empty(size * (rank + 1), device="npu")
dist.all_to_all_single(out, source, [rank + 1] * size, lengths)
assert out.tolist() == sum(mine, [])
parts = [torch.empty(rank + 1, device="npu") for _ in range(size)]
dist.all_to_all(parts, list(source.split(lengths)))
assert [part.tolist() for part in parts] == mine
""")


def test_batched_transfers_of_several_sizes(ranks: Ranks) -> None:
    """Every rank sends two tensors of its own sizes to each other one, all in one batch."""
    ranks.run("""
part = lambda one, other, n: torch.full((1 + one + 2 * other + 100 * n,), 10.0 * one + other, device="npu")
others = [r for r in range(size) if r != rank]
came = {(r, n): torch.zeros_like(part(r, rank, n)) for r in others for n in (0, 1)}
sends = [dist.P2POp(dist.isend, part(rank, r, n), r, tag=n) for r in others for n in (0, 1)]
receives = [dist.P2POp(dist.irecv, x, r, tag=n) for (r, n), x in came.items()]
for work in dist.batch_isend_irecv(receives + sends): work.wait()
assert all(torch.equal(x, part(r, rank, n)) for (r, n), x in came.items())
""")
