"""torch.profiler sees the device: kernels with their times, the ops that launched them, and memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from pathlib import Path

BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 256, device="npu")


def kernels(profiler: profile) -> list[Any]:
    return [event for event in profiler.events() if event.device_type == DeviceType.PrivateUse1]


def test_each_kernel_lies_within_the_op_that_launched_it(x: torch.Tensor) -> None:
    with profile(activities=BOTH) as profiler:
        x.relu().softmax(-1).amax().item()
    ran = kernels(profiler)
    assert [kernel.name for kernel in ran] == [
        "aten::relu",
        "aten::_softmax",
        "aten::amax",
        "aten::_local_scalar_dense",
    ]
    ops = {event.id: event for event in profiler.events() if event.device_type == DeviceType.CPU}
    for kernel in ran:
        op = ops[kernel.linked_correlation_id]
        assert op.time_range.start <= kernel.time_range.start <= kernel.time_range.end <= op.time_range.end
        assert kernel.name.split(".")[0] == op.name
    relu = next(op for op in ops.values() if op.name == "aten::relu")
    assert relu.device_time_total == ran[0].time_range.elapsed_us() > 0


def test_replayed_kernels_are_seen_one_by_one(x: torch.Tensor) -> None:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.relu().softmax(-1)
    with profile(activities=BOTH) as profiler:
        graph.replay()
    assert [kernel.name for kernel in kernels(profiler)] == ["aten::relu", "aten::_softmax"]


def test_chrome_trace_has_a_row_for_the_device(x: torch.Tensor, tmp_path: Path) -> None:
    with profile(activities=BOTH, record_shapes=True) as profiler:
        x.relu()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    labels = {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    (kernel,) = (event for event in events if event.get("cat") == "kernel")
    assert labels[kernel["pid"]] == "npu:0"
    assert kernel["name"] == "aten::relu"
    assert kernel["args"]["stream"] == 0
    op = next(event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::relu")
    assert op["args"]["External id"] == kernel["args"]["External id"]
    assert op["args"]["Input Dims"] == [[64, 256]]


def test_memory_is_that_of_the_device(x: torch.Tensor) -> None:
    with profile(activities=BOTH, profile_memory=True) as profiler:
        y = x.relu()
        del y
    sizes = [event.device_memory_usage for event in profiler.events() if event.name in ("aten::relu", "[memory]")]
    assert x.nbytes in sizes
    assert -x.nbytes in sizes


def test_threads_record_into_one_profile(x: torch.Tensor) -> None:
    with profile(activities=BOTH) as profiler:
        torch.nn.functional.softmax(x.requires_grad_(), -1).sum().backward()
    names = [kernel.name for kernel in kernels(profiler)]
    assert any("_softmax_backward" in name for name in names), "the backward runs on autograd's thread"


def test_a_profile_of_the_host_alone_has_no_kernels(x: torch.Tensor) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        x.relu()
    assert kernels(profiler) == []
    assert any(event.name == "aten::relu" for event in profiler.events())


def test_ops_are_timed_by_events_without_kineto(x: torch.Tensor, capfd: pytest.CaptureFixture[str]) -> None:
    with torch.autograd.profiler.profile(use_device="npu") as profiler:
        for _ in range(3):
            x.relu()
    (relu,) = (row for row in profiler.key_averages() if row.key == "aten::relu")
    assert relu.count == 3
    assert 0 < relu.device_time_total < relu.cpu_time_total * 10
    assert 0 < relu.cpu_time_total < 60e6  # us
    assert "PrivateUse1 used in profiler but not enabled" not in capfd.readouterr().err
