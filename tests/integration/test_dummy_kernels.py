"""Which kernels of npu-ops compute nothing where a batch is run for its allocations or launches alone."""

from __future__ import annotations

import re

import torch

import npu_ops
from npu_platform.dummy_kernels import RUN, SKIPPED, launches_alone, of_dummy_run
from tests.support.environments import ROOT


def test_each_kernel_of_npu_ops_is_skipped_or_runs() -> None:
    sources = [path for path in (ROOT / "packages/npu-ops/csrc").rglob("*") if path.suffix in (".cpp", ".h", ".inc")]
    launched = {name for path in sources for name in re.findall(r'"npu_ops::(\w+)"', path.read_text())}
    assert launched == SKIPPED | RUN
    assert not SKIPPED & RUN


def test_a_graph_has_what_was_skipped_when_it_was_captured() -> None:
    assert npu_ops.native.available()
    x, weight = torch.full((4, 64), 3.0, device="npu"), torch.ones(64, device="npu")
    table, out = torch.eye(64, device="npu"), torch.empty(4, 64, device="npu")
    graph = torch.npu.NPUGraph()
    before = torch.npu.launch_counts()[0]
    with launches_alone(recorded=True), torch.npu.graph(graph):
        normed = torch.ops.npu_ops.rms_norm(x, weight, 1e-6)
        normed.fill_(7.0)  # an op of PyTorch, which runs
        again = torch.ops.npu_ops.rms_norm(normed, weight, 1e-6)
        out.copy_(torch.nn.functional.linear(again, table))
    assert torch.npu.launch_counts()[0] > before
    assert normed.unique().tolist() == [7.0]
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out.cpu(), torch.ones(4, 64))
    with launches_alone(recorded=False):
        left = torch.nn.functional.linear(x, table, torch.ones(64, device="npu")).fill_(5.0)
        assert left.unique().tolist() == [5.0]
        torch.ops.npu_ops.fused_add_rms_norm(x, left, weight, 1e-6)
    assert (x.unique().tolist(), left.unique().tolist()) == ([3.0], [5.0])


def test_beside_other_replicas_all_but_linear_layers_compute() -> None:
    x, weight = torch.full((4, 64), 3.0, device="npu"), torch.ones(64, device="npu")
    with of_dummy_run():
        normed = torch.ops.npu_ops.rms_norm(x, weight, 1e-6)
        left = torch.ops.npu_ops.linear(normed, torch.eye(64, device="npu"), None).fill_(5.0)
    torch.testing.assert_close(normed.cpu(), torch.ones(4, 64))
    assert left.unique().tolist() == [5.0]
    for options in ({"is_profile": True}, {"is_graph_capturing": True}):
        with of_dummy_run(**options):
            residual = x.clone()
            torch.ops.npu_ops.fused_add_rms_norm(normed, residual, weight, 1e-6)
        assert torch.equal(residual, x)
