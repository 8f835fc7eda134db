"""The null device: it computes nothing, all of it reads as zero, and memory and time are kept.

Ops that make their results by shape functions are in tests/integration, where processes have imported what those need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conftest import RunPython

MEMORY = """
import torch
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

properties = torch.npu.get_device_properties()
assert (properties.driver, properties.computes, properties.multi_processor_count) == ("null", False, 1)
assert properties.total_memory == 200 << 30 and "Null" in properties.name

# The weights of 70 billion parameters, filled and copied: they are counted, and cost no memory of the host.
before = resident()
weights = [torch.zeros(1 << 30, dtype=torch.bfloat16, device="npu") for _ in range(70)]
copies = [torch.ones(1 << 20).to("npu") for _ in range(8)]
weights[3].copy_(weights[4])
assert torch.npu.memory_allocated() == (140 << 30) + 8 * (4 << 20)
assert resident() - before < 100 << 20, resident() - before
try:
    torch.empty(70 << 30, dtype=torch.uint8, device="npu")
    raise SystemExit("more memory than there is")
except torch.OutOfMemoryError as error:
    assert "200.00 GiB" in str(error)
del weights, copies
torch.npu.empty_cache()
assert torch.npu.mem_get_info()[0] == 200 << 30

# Everything reads as zero, whatever was put there.
x = torch.full((3, 4), 7.0).to("npu")
assert x.tolist() == [[0.0] * 4] * 3 and x[1, 2].item() == 0 and x.t().double().cpu().eq(0).all()
host = torch.full((4, 3), 5.0).pin_memory()
host.copy_(x.t(), non_blocking=True)
torch.npu.synchronize()
assert host.eq(0).all()

# Time: 5 us a launch, on the stream and not on the host, in replayed graphs too.
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    for _ in range(400):
        x.zero_()
start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
other = torch.npu.Stream()
torch.npu.synchronize()
start.record()
for _ in range(100):
    graph.replay()
end.record()
assert not end.query() and not torch.npu.current_stream().query() and other.query()
other.wait_event(end)
assert not other.query()
other.synchronize()
assert end.query() and start.elapsed_time(end) >= 100 * 400 * 0.005
print("all well")
"""


def test_memory_values_and_time(run_python: RunPython) -> None:
    done = run_python(MEMORY, NPU_DEVICE="null", NPU_SIMULATOR_MEMORY="200GiB")
    assert done.stdout == "all well\n", done.stderr


def test_options_and_processes(run_python: RunPython) -> None:
    program = """
import os, torch
x = torch.zeros(4, device="npu:1")
start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
start.record(), end.record()
if (child := os.fork()) == 0:
    assert torch.npu.device_count() == 2 and torch.zeros(1 << 20, device="npu:1").tolist()[-1] == 0
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
torch.npu.set_device(1)
start.record()
x.zero_()
end.record()
torch.npu.synchronize()
print(round(start.elapsed_time(end)))
"""
    done = run_python(program, NPU_DEVICE="null:launch=30ms", NPU_SIMULATOR_DEVICES="2")
    assert done.stdout == "30\n", done.stderr
    wrong = run_python("import torch\ntorch.ones(1, device='npu')", NPU_DEVICE="null:speed=3")
    assert "NPU_DEVICE='null:speed=3' cannot be used" in wrong.stderr


LATE_SHAPES = """
import torch
library = torch.library.Library("npu_tests_shapes", "FRAGMENT")
library.define("grow(Tensor x) -> Tensor")
library.impl("grow", lambda x: torch.zeros(x.numel() + 1), "CPU")
x = torch.ones(3, device="npu")
print(torch.ops.npu_tests_shapes.grow(x).shape)
library.impl("grow", lambda x: x.new_empty(x.numel() + 2), "Meta")
print(torch.ops.npu_tests_shapes.grow(x).shape)
"""


def test_a_shape_function_counts_from_its_registration_on(run_fresh_python: RunPython) -> None:
    done = run_fresh_python(LATE_SHAPES, NPU_DEVICE="null")
    assert done.stdout.splitlines() == ["torch.Size([4])", "torch.Size([5])"], done.stderr
