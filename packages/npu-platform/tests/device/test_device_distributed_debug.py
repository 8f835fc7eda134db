"""NPU_DEBUG=memory in a process group: gloo's threads may use tensors while they transfer them, nobody afterwards."""

from __future__ import annotations

from pathlib import Path

from .ranks import Ranks

HELPERS = """
import ctypes, os
libc = ctypes.CDLL(None)
sink = os.pipe()[1]

def is_open(x):  # the system refuses to read closed pages, and does not crash
    return libc.write(sink, ctypes.c_void_p(x.data_ptr()), 1) == 1

def check(x, expected):
    assert x.tolist() == expected, x.tolist()
    assert not is_open(x), "memory must be closed again"

def empty(): return torch.empty(4, device="npu")
mine = torch.full((4,), rank + 1.0, device="npu")
"""


def test_transfers_by_gloo_are_allowed_and_memory_is_closed_after_them(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, NPU_DEBUG="memory") as ranks:
        ranks.run(HELPERS)
        ranks.run("x = empty(); dist.all_to_all_single(x, mine); check(x, [1, 1, 2, 2])")
        ranks.run("x = empty(); dist.all_to_all_single(x, mine, async_op=True).wait(); check(x, [1, 1, 2, 2])")
        ranks.run("x = empty(); dist.all_to_all(list(x.chunk(2)), list(mine.chunk(2))); check(x, [1, 1, 2, 2])")
        ranks.run("x = empty(); dist.send(mine, 1) if rank == 0 else (dist.recv(x, 0), check(x, [1] * 4))")
        ranks.run("x = mine.clone(); dist.all_reduce(x); check(x, [3] * 4)")
        ranks.run("x = mine.clone(); dist.all_reduce(x, async_op=True).wait(); check(x, [3] * 4)")


def test_memory_is_open_as_long_as_a_transfer_may_use_it(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, NPU_DEBUG="memory") as ranks:
        ranks.run(HELPERS)
        assert ranks.run("x = empty(); work = dist.irecv(x, 1); value = is_open(x)", [0]) == [True]
        ranks.run("dist.isend(mine, 0).wait(); check(mine, [2] * 4)", [1])
        ranks.run("work.wait(); check(x, [2] * 4)", [0])
        ranks.run("work = dist.isend(mine, 0); value = is_open(mine)", [1])
        ranks.run("dist.recv(x, 1); check(x, [2] * 4)", [0])
        ranks.run("del work; check(mine, [2] * 4)", [1])
