"""The device in fresh, forked and spawned processes, and what the environment makes of it."""

from __future__ import annotations

import pytest

from .conftest import RunPython

IMPORT = "import torch; torch.manual_seed(1); print('imported', torch.npu.is_available())"
USE = """
import torch
print("available", torch.npu.is_available())
try: torch.ones(1, device="npu")
except RuntimeError as error: print(error)
"""


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("NPU_SIMULATOR_MEMORY", "abc", "e.g. 8GiB"),
        ("NPU_SIMULATOR_DEVICES", "0", "whole number from 1 to 16"),
        ("NPU_VISIBLE_DEVICES", "0,3", "below NPU_SIMULATOR_DEVICES"),
        ("NPU_FALLBACK", "loud", "silent, warn or error"),
    ],
)
def test_bad_value_is_an_error_at_first_use(run_python: RunPython, name: str, value: str, remedy: str) -> None:
    done = run_python(USE, **{name: value})
    assert done.returncode == 0, done.stderr
    assert "available False" in done.stdout
    assert f"{name}='{value}' cannot be used" in done.stdout
    assert remedy in done.stdout


def test_bad_values_are_no_error_of_import_torch(run_fresh_python: RunPython) -> None:
    bad = {"NPU_SIMULATOR_MEMORY": "abc", "NPU_SIMULATOR_DEVICES": "0", "NPU_FALLBACK": "loud"}
    done = run_fresh_python(IMPORT, **bad)
    assert done.returncode == 0, done.stderr
    assert "imported False" in done.stdout


def test_several_devices_with_memory_of_their_own(run_python: RunPython) -> None:
    done = run_python(
        """
import torch
assert torch.npu.device_count() == 2
assert torch.npu.mem_get_info(1)[1] == 1 << 29
a = torch.ones(1 << 20, device="npu:1")
assert (torch.npu.memory_allocated(0), torch.npu.memory_allocated(1)) == (0, 4 << 20)
b = a.to("npu:0")
assert b.device.index == 0 and torch.equal(a.cpu(), b.cpu()) and b.data_ptr() != a.data_ptr()
assert (a + 1).device.index == 1
with torch.npu.device(1):
    assert torch.empty(1, device="npu").device.index == 1
assert torch.npu.current_device() == 0
try: a + b
except RuntimeError as error: print(error)
try: torch.ones(1, device="npu:2")
except RuntimeError as error: print(error)
graph = torch.npu.NPUGraph()
try:
    with torch.npu.graph(graph): c = a * 3
except RuntimeError as error: print(error)
graph.reset()
with torch.npu.device(1), torch.npu.graph(graph): c = a * 3
a.fill_(2); graph.replay()
assert c.device.index == 1 and c[0].item() == 6
""",
        NPU_SIMULATOR_DEVICES="3",
        NPU_VISIBLE_DEVICES="2,0",
        NPU_SIMULATOR_MEMORY="512MiB",
    )
    assert done.returncode == 0, done.stderr
    assert "at least two devices" in done.stdout
    assert "aten::mul.Tensor on a stream that is not part of the capture" in done.stdout
    assert "invalid device ordinal 2" in done.stdout


def test_out_of_memory_follows_the_setting(run_python: RunPython) -> None:
    done = run_python(
        """
import torch
x = torch.empty(40 << 20, dtype=torch.int8, device="npu")
for attempt in (lambda: x.clone(), lambda: x.double(), lambda: torch.sort(x)):
    try: attempt()
    except torch.OutOfMemoryError as error: print("64.00 MiB" in str(error))
y = torch.ones(1 << 20, dtype=torch.int8, device="npu")
print(y.sum().item(), torch.npu.memory_allocated())
""",
        NPU_SIMULATOR_MEMORY="64MiB",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True", str(1 << 20), str(41 << 20)]


def test_no_device_is_visible(run_python: RunPython) -> None:
    done = run_python("import torch; print(torch.npu.is_available(), torch.npu.device_count())", NPU_VISIBLE_DEVICES="")
    assert done.stdout.split() == ["False", "0"]


def test_fallback_report(run_python: RunPython) -> None:
    program = (
        "import torch\nx = torch.ones(3, device='npu')\n"
        "try: (x.exp(), x.exp())\nexcept NotImplementedError as error: print(error)\n"
    )
    warned = run_python(program, NPU_FALLBACK="warn")
    assert warned.stderr.count("aten::exp has no npu kernel") == 1
    refused = run_python(program.replace("torch.ones(3,", "torch.empty(3,"), NPU_FALLBACK="error")
    assert "aten::exp" in refused.stdout
    assert "NPU_FALLBACK=error" in refused.stdout


def test_device_can_be_kept_out(run_fresh_python: RunPython) -> None:
    done = run_fresh_python(
        "import torch, npu_platform.torch_npu as t\nprint(hasattr(torch, 'npu'), t.inactive_reason())",
        NPU_DEVICE="off",
    )
    assert done.stdout.strip() == "False NPU_DEVICE=off"


def test_a_library_for_another_torch_is_named_and_torch_is_imported_all_the_same(run_fresh_python: RunPython) -> None:
    done = run_fresh_python(
        "import pathlib; read = pathlib.Path.read_text\n"
        "pathlib.Path.read_text = lambda p, *a, **k: '2.9.1' if p.name == 'built_for_torch' else read(p, *a, **k)\n"
        "import torch, npu_platform.torch_npu as t\nprint(hasattr(torch, 'npu'), t.inactive_reason())"
    )
    assert "False npu_platform._C is compiled for torch 2.9.1 and this is 2.1" in done.stdout


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("npu_platform", marks=pytest.mark.nightly),
        pytest.param("npu_platform.torch_npu", marks=pytest.mark.nightly),
        "npu_platform.torch_npu.memory",
        "torch",
    ],
)
def test_packages_can_be_imported_in_any_order(first: str, run_fresh_python: RunPython) -> None:
    done = run_fresh_python(
        f"import {first}, torch\nprint(torch.ones(2, device='npu').sum().item(), torch.npu.device_count())"
    )
    assert done.stdout.split() == ["2.0", "1"]


def test_import_of_torch_brings_up_no_device(run_fresh_python: RunPython) -> None:
    done = run_fresh_python(
        "import torch\ntorch.manual_seed(5)\nprint(torch.npu.is_initialized())\n"
        "a = torch.randn(3, device='npu').cpu(); torch.manual_seed(5)\n"
        "print(torch.equal(a, torch.randn(3)), torch.npu.is_initialized())"
    )
    assert done.stdout.split() == ["False", "True", "True"]


def test_forked_and_spawned_children(run_fresh_python: RunPython, tmp_path) -> None:
    script = tmp_path / "children.py"
    script.write_text(
        """
import os, sys
import torch
import torch.multiprocessing as mp

def child(queue, given, read):
    local = torch.ones(300_000, device="npu")
    queue.put((local.sum().item(), given.sum().item(), given[:2] * 2))
    read.wait()  # what is sent lies in shared memory of this process
    queue.close(); queue.join_thread()

if __name__ == "__main__":
    x = torch.ones(1000, device="npu")
    torch.ones(1 << 22) + 1  # starts OpenMP's threads
    torch.zeros(1 << 24, dtype=torch.int8, device="npu").copy_(torch.ones(1 << 24, dtype=torch.int8))  # starts the pool
    for method in ("fork", "spawn"):
        context = mp.get_context(method)
        queue, read = context.Queue(), context.Event()
        process = context.Process(target=child, args=(queue, x, read))
        process.start()
        local, given, sent = queue.get(timeout=60)
        read.set()
        print(method, local, given, sent.device, sent.sum().item())
        process.join()
        assert process.exitcode == 0
    assert x.sum().item() == 1000
"""
    )
    program = "import runpy, sys; sys.argv = [{0!r}]; runpy.run_path({0!r}, run_name='__main__')"
    done = run_fresh_python(program.format(str(script)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{method} 300000.0 1000.0 npu:0 4.0" for method in ("fork", "spawn")]


def test_tensors_in_a_queue_are_copies_that_keep_their_strides(run_fresh_python: RunPython, tmp_path) -> None:
    script = tmp_path / "copies.py"
    script.write_text(
        """
import sys
import torch
import torch.multiprocessing as mp

def tensors():
    x = torch.arange(24.0, device="npu").view(4, 6)
    return [x.t(), x[1:, ::2], x[0].expand(3, 6), x[:0], x.sum(), x[1:].t().to(torch.bfloat16),
            torch.view_as_complex(x.view(4, 3, 2)).conj().t(), x > 3]

def child(queue, replies, given):
    got = [queue.get(timeout=60) for _ in tensors()]
    for mine, sent, passed in zip(tensors(), got, given, strict=True):
        for other in (sent, passed):
            assert torch.equal(mine, other) and mine.stride() == other.stride() and mine.dtype == other.dtype
    got[0].fill_(7)
    replies.put("checked")

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = mp.get_context(method)
        queue, replies = context.Queue(), context.Queue()
        sent = tensors()
        process = context.Process(target=child, args=(queue, replies, sent))
        process.start()
        for each in sent:
            queue.put(each)
        print(replies.get(timeout=60))
        process.join()
        assert process.exitcode == 0
        assert sent[0][0, 0].item() == 0  # what the child writes stays there
"""
    )
    program = "import runpy, sys; sys.argv = [{0!r}]; runpy.run_path({0!r}, run_name='__main__')"
    done = run_fresh_python(program.format(str(script)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["checked", "checked"]


def test_devices_share_the_memory_of_the_host(run_python: RunPython) -> None:
    """So that replicas of an engine, which must have a device each, can all fill theirs."""
    program = "import os, torch; print(torch.npu.mem_get_info(0)[1])"
    one, two = (
        int(run_python(program, NPU_SIMULATOR_DEVICES=devices, NPU_SIMULATOR_MEMORY="").stdout)
        for devices in ("1", "2")
    )
    granule = 2 << 20
    assert abs(2 * two - one) <= 2 * granule


def test_forks_while_other_threads_pin_memory_seed_and_draw(run_python: RunPython) -> None:
    program = """
import os, signal, threading
import torch

torch.rand(2, device="npu")
going = True
def draw():
    while going: torch.randn(20_000, device="npu")
def pin():
    while going: torch.empty(1000, pin_memory=True)
def seed():
    while going: torch.npu.manual_seed_all(3)
threads = [threading.Thread(target=work) for work in (draw, draw, pin, pin, seed)]
for thread in threads: thread.start()
codes = set()
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it waits for ever
        torch.empty(1000, pin_memory=True)
        torch.npu.manual_seed_all(4)
        torch.rand(2, device="npu")
        os._exit(0)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
going = False
for thread in threads: thread.join()
print(codes)
"""
    done = run_python(program)
    assert done.stdout == "{0}\n", done.stderr


def test_forks_while_devices_share_the_state_of_a_generator(run_python: RunPython) -> None:
    program = """
import os, signal
import torch

signal.alarm(60)  # ends it where it waits for ever
torch.ones(2, device="npu")
first, second = torch.npu.default_generators
second.graphsafe_set_state(first.graphsafe_get_state())
child = os.fork()
if child == 0:
    os._exit(not torch.rand(2, device="npu:1").any())
print(os.waitpid(child, 0)[1])
"""
    done = run_python(program, NPU_SIMULATOR_DEVICES="2")
    assert done.stdout == "0\n", done.stderr


def test_a_pool_that_lives_to_the_end_goes_without_a_word(run_fresh_python: RunPython) -> None:
    done = run_fresh_python("import torch\npool = torch.npu.MemPool()\nprint('done')")
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_processes_may_end_right_after_a_backward(run_fresh_python: RunPython) -> None:
    program = """
import gc, os, sys
import torch

gc.freeze()
sys.setswitchinterval(10)  # the thread that ends is seldom let in, so that each of these has something to wait for
children = []
for _ in range(6):
    child = os.fork()
    if child == 0:
        x = torch.ones(3, device="npu", requires_grad=True)
        (x * 2).sum().backward()
        break
    children.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(children)
"""
    done = run_fresh_python(program)
    assert done.stdout == f"{[0] * 6}\n", done.stderr
