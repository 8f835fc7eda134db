"""A Triton kernel is a kernel of the device: graphs, profiler, faults, counts, threads; and what a process shares."""

from __future__ import annotations

import math
import subprocess
import sys
import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from npu_platform.errors import KernelLaunchError


@triton.jit
def scale_kernel(x, o, n, factor, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    tl.store(o + i, tl.load(x + i, mask=mask) * factor, mask=mask)


def scale(x, out, factor=2.0):
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), factor, B=64)


def test_a_graph_replays_launches_without_python():
    x, y, out = (torch.ones(100, device="npu") for _ in range(3))
    scale(x, out)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        scale(x, y)
        scale(y, out, 3.0)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert out.unique().tolist() == [6 * value]


def test_launches_are_counted_profiled_skipped_and_struck_by_faults():
    x, out = torch.ones(100, device="npu"), torch.zeros(100, device="npu")
    scale(x, out)
    before = torch.npu.launch_counts()[0]
    scale(x, out)
    assert torch.npu.launch_counts()[0] == before + 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.PrivateUse1]) as profile:
        scale(x, out)
    assert "triton::scale_kernel" in [event.name for event in profile.events()]
    out.zero_()
    with torch.npu.skip_kernels("triton::scale_kernel"):
        scale(x, out)
    assert not out.any()
    with torch.npu.faults.fail_kernel("triton::scale_kernel"), pytest.raises(KernelLaunchError):
        scale(x, out)
    scale(x, out)
    assert out.unique().tolist() == [2]


def test_threads_and_streams_launch_at_the_same_time():
    x = torch.ones(1000, device="npu")
    outs = [torch.zeros(1000, device="npu") for _ in range(4)]

    def work(out, factor):
        with torch.npu.stream(torch.npu.Stream()):
            for _ in range(20):
                scale(x, out, factor)

    threads = [threading.Thread(target=work, args=(out, float(number))) for number, out in enumerate(outs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [out.unique().tolist() for out in outs] == [[0.0], [1.0], [2.0], [3.0]]


@triton.jit
def turns_kernel(o, times, turns):
    program = tl.program_id(0)
    began = globaltimer()
    value = 0.0
    for turn in range(turns):
        value += tl.sum(tl.exp(-tl.arange(0, 32).to(tl.float32) - turn))
    tl.store(o + program, value)
    tl.store(times + 2 * program, began)
    tl.store(times + 2 * program + 1, globaltimer())


def test_programs_are_shared_when_they_take_long_though_the_last_ones_took_little():
    """Which of them are worth another thread is told by the last launch's; the launching thread does not stay alone."""
    out, times = torch.zeros(6, device="npu"), torch.zeros(6, 2, dtype=torch.int64, device="npu")
    alone = 1 / (1 - math.exp(-1))  # of a turn
    for turns in (2, 2, 2, 50_000, 2, 2, 50_000):
        turns_kernel[(6,)](out, times, turns)
        torch.testing.assert_close(out.cpu(), torch.full((6,), alone * alone * (1 - math.exp(-turns))))
        if turns > 2:
            begun, ended = times.cpu().unbind(1)
            assert (begun[1:] < ended.cummax(0).values[:-1]).any(), "no two programs ran at the same time"


def test_tensors_of_the_host_are_refused_and_empty_grids_are_nothing():
    x, out = torch.ones(100, device="npu"), torch.zeros(100, device="npu")
    with pytest.raises(ValueError, match="move it to npu") as raised:
        scale(x.cpu(), out)
    assert isinstance(raised.value, KernelLaunchError)
    scale_kernel[(0,)](x, out, 100, 2.0, B=64)
    assert not out.any()


def test_grids_that_no_number_of_a_kernel_can_count_are_refused():
    x, out = torch.ones(100, device="npu"), torch.zeros(100, device="npu")
    for grid in ((2**32 + 1,), (1, 2**31), (2**31 - 1, 2**31 - 1, 2**31 - 1)):
        with pytest.raises(KernelLaunchError, match="let each program do more"):
            scale_kernel[grid](x, out, 100, 2.0, B=64)
    assert not out.any()


def test_numbers_do_not_compile_a_kernel_again():
    x, out = torch.ones(512, device="npu"), torch.zeros(512, device="npu")
    keys = {scale_kernel[(1,)](x[begin:], out, n, 2.0, B=64).hash for begin, n in ((0, 64), (1, 50), (4, 480))}
    assert len(keys) == 1


def test_a_launch_calls_no_function_of_npus_own_python():
    x, out = torch.ones(100, device="npu"), torch.zeros(100, device="npu")
    scale(x, out)
    called = []

    def note(frame, event, _argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("npu_platform"):
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        scale(x, out)
    finally:
        sys.setprofile(None)
    assert called == []


@triton.jit
def argument_kernel(o, a, b, c, d, pair, missing, B: tl.constexpr):
    tl.store(o, a.to(tl.float64))
    tl.store(o + 1, b.to(tl.float64))
    tl.store(o + 2, c.to(tl.float64))
    tl.store(o + 3, d.to(tl.float64))
    tl.store(o + 4, pair[0] + pair[1].to(tl.float64))
    if missing is not None:
        tl.store(o + 5, 1.0)


def test_arguments_of_all_kinds():
    out = torch.zeros(6, dtype=torch.float64, device="npu")
    argument_kernel[(1,)](out, -5, 2**40, True, 1.5, (0.25, 2**63 + 2**12), None, B=1)
    assert out.tolist() == [-5, 2**40, 1, 1.5, float(2**63 + 2**12), 0]


def test_hooks_are_called_around_a_launch():
    x, out, seen = torch.ones(100, device="npu"), torch.zeros(100, device="npu"), []
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    noting = [lambda metadata, when=when: seen.append((when, metadata.get()["name"])) for when in ("before", "after")]
    for hook, note in zip(hooks, noting, strict=True):
        hook.add(note)
    try:
        scale(x, out)
    finally:
        for hook, note in zip(hooks, noting, strict=True):
            hook.remove(note)
    scale(x, out)
    assert seen == [("before", "scale_kernel"), ("after", "scale_kernel")]


@pytest.mark.parametrize("wrong", ["a string", 1.5, None])
def test_an_argument_of_another_type_than_the_kernel_has_is_refused(wrong):
    x, out = torch.ones(64, device="npu"), torch.zeros(64, device="npu")
    kernel = scale_kernel[(1,)](x, out, 64, 2.0, B=64)
    with pytest.raises(TypeError):
        kernel[(1, 1, 1)](x, out, wrong, 2.0, 64)
    with pytest.raises(TypeError, match="takes 5 arguments, not 2"):
        kernel[(1, 1, 1)](x, out)


PROGRAM = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
x, out = torch.ones(100, device="npu"), torch.zeros(100, device="npu")
module.scale(x, out)
assert out.unique().tolist() == [2]
"""


def test_processes_that_compile_the_same_kernel_at_once_share_one_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", PROGRAM, __file__]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert not list(tmp_path.rglob("*.part"))
    assert list((tmp_path / "npu").glob("*.so"))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({"CXX": "no-such-compiler"}, False),
        ({"NPU_DEVICE": "/path/to/driver.so"}, False),
        ({"NPU_DEVICE": "/path/to/driver.so", "TRITON_DEFAULT_BACKEND": "npu"}, True),
        ({"TRITON_DEFAULT_BACKEND": "nvidia"}, False),
        ({"TRITON_DEFAULT_BACKEND": "npu"}, True),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, False),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, True),
    ],
)
def test_vllm_has_triton_unless_it_is_left_out_or_could_not_run(variables, expected, monkeypatch):
    from npu_platform.triton.driver import NPUDriver

    assert NPUDriver.is_active()
    for name in ("TRITON_DEFAULT_BACKEND", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = {"__name__": "vllm.triton_utils.importing", "driver": NPUDriver}
    exec("found = [driver.is_active()]", asked)
    assert asked["found"] == [expected]
