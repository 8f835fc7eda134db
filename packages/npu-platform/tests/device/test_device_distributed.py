"""The process group npuccl: every collective of npu tensors between two ranks, asynchronous and captured ones too."""

from __future__ import annotations

from pathlib import Path

from .conftest import RunPython

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def check(name, tensor, expected):
    assert tensor.device.type == "npu", name
    assert tensor.tolist() == expected, (name, tensor.tolist(), expected)

def rank_main(rank, size, path):
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:npuccl", init_method="file://" + path, rank=rank, world_size=size)
    mine = torch.full((4,), rank + 1.0, device="npu")
    assert mine.device.index == rank

    x = mine.clone(); dist.all_reduce(x); check("all_reduce", x, [3.0] * 4)
    x = mine.clone(); work = dist.all_reduce(x, async_op=True); work.wait(); check("async", x, [3.0] * 4)
    x = mine.clone(); work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    kept = x; del x; work.wait(); check("async, let go", kept, [2.0] * 4)
    x = mine.clone(); dist.broadcast(x, 1); check("broadcast", x, [2.0] * 4)
    x = mine.clone(); dist.reduce(x, 0)
    if rank == 0: check("reduce", x, [3.0] * 4)
    parts = [torch.empty(4, device="npu") for _ in range(size)]
    dist.all_gather(parts, mine); check("all_gather", torch.cat(parts), [1.0] * 4 + [2.0] * 4)
    out = torch.empty(8, device="npu")
    dist.all_gather_into_tensor(out, mine); check("all_gather_into_tensor", out, [1.0] * 4 + [2.0] * 4)
    half = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(half, mine); check("reduce_scatter_tensor", half, [3.0] * 2)
    dist.reduce_scatter(half, [mine[:2].contiguous(), mine[2:].contiguous()]); check("reduce_scatter", half, [3.0] * 2)
    gathered = [torch.empty(4, device="npu") for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    if rank == 0: check("gather", torch.cat(gathered), [1.0] * 4 + [2.0] * 4)
    x = torch.empty(4, device="npu")
    dist.scatter(x, [mine, mine + 1] if rank == 0 else None, src=0); check("scatter", x, [rank + 1.0] * 4)
    x = torch.empty(4, device="npu")
    dist.all_to_all_single(x, mine + torch.arange(4, device="npu")); first = 2.0 * rank
    check("all_to_all_single", x, [1 + first, 2 + first, 2 + first, 3 + first])
    parts = [torch.empty(2, device="npu") for _ in range(size)]
    dist.all_to_all(parts, [mine[:2].contiguous(), mine[2:].contiguous() + 10])
    check("all_to_all", torch.cat(parts), [1 + 10.0 * rank] * 2 + [2 + 10.0 * rank] * 2)
    if rank == 0: dist.send(mine, 1)
    else:
        x = torch.empty(4, device="npu"); dist.recv(x, 0); check("recv", x, [1.0] * 4)
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}); assert [o["rank"] for o in objects] == [0, 1]
    group = dist.new_group([0, 1])
    x = mine.to(torch.bfloat16); dist.all_reduce(x, group=group); check("new_group, bfloat16", x, [3.0] * 4)
    import torch.distributed._functional_collectives as functional
    check("functional", functional.all_reduce(mine, "sum", group) + 0, [3.0] * 4)

    source = torch.ones(4, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = source * (rank + 1); dist.all_reduce(y); z = y + 1
    source.fill_(10); graph.replay(); check("captured", z, [31.0] * 4)
    dist.destroy_process_group()
    os.write(1, f"rank {rank} ok\\n".encode())  # in one piece beside the other

if __name__ == "__main__":
    mp.start_processes(rank_main, (2, sys.argv[1]), nprocs=2, start_method="fork")
"""


def test_every_collective_between_two_ranks(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(PROGRAM)
    done = run_python(
        f"import runpy, sys; sys.argv = [{str(script)!r}, {str(tmp_path / 'store')!r}];"
        f" runpy.run_path({str(script)!r}, run_name='__main__')",
        NPU_SIMULATOR_DEVICES="2",
        NPU_SIMULATOR_MEMORY="256MiB",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 ok", "rank 1 ok"]
