"""NPU_DEBUG=memory: what reads or writes device memory that it must not is named, and all that may goes on working."""

from __future__ import annotations

import re
import signal

import pytest

from .conftest import RunPython

KERNELS = """
import ctypes, torch
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
class Table(ctypes.Structure):
    _fields_ = [("abi", ctypes.c_uint32),
                ("launch", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, RUN, ctypes.c_void_p, RUN)),
                ("parallel_for", ctypes.c_void_p), ("num_threads", ctypes.c_void_p),
                ("last_error", ctypes.CFUNCTYPE(ctypes.c_char_p))]
table = Table.from_address(torch.ops.npu.launch_table())
nothing = RUN(lambda _: None)
def kernel(body):
    '''Launch body as a kernel of a library; return its error, if any.'''
    return table.last_error().decode() if table.launch(0, b"mine::kernel", RUN(lambda _: body()), None, nothing) else ""
"""
"""Python functions as kernels of the device: they may do what no kernel of ours does."""


def test_host_code_cannot_read_device_memory(run_python: RunPython) -> None:
    done = run_python(
        "import ctypes, torch\nx = torch.ones(100, device='npu')\nprint('alive', flush=True)\n"
        "ctypes.string_at(x.data_ptr() + 12, 4)\nprint('not reached')",
        NPU_DEBUG="memory",
    )
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "alive\n"
    assert re.search(
        r"npu memory check: bad read at 0x\w+ on npu:0, at byte 12 of the tensor memory of 400 bytes at 0x\w+, "
        r"outside any kernel: host code used a device pointer; copy the tensor with \.cpu\(\) first",
        done.stderr,
    ), done.stderr


def test_pythons_fault_handler_still_has_its_say(run_python: RunPython) -> None:
    done = run_python(
        "import ctypes, faulthandler, torch\nfaulthandler.enable()\nx = torch.ones(100, device='npu')\n"
        "ctypes.memset(x.data_ptr(), 0, 4)",
        NPU_DEBUG="1",
    )
    assert done.returncode == -signal.SIGSEGV
    assert "bad write" in done.stderr
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_a_fault_elsewhere_is_not_ours(run_python: RunPython) -> None:
    done = run_python("import ctypes, torch\ntorch.ones(1, device='npu')\nctypes.string_at(16, 4)", NPU_DEBUG="memory")
    assert done.returncode == -signal.SIGSEGV
    assert "npu memory check" not in done.stderr


@pytest.mark.parametrize(
    ("offset", "what"),
    [(4096, r"0 bytes past the end of the tensor memory of 4096 bytes"), (-5000, r"on npu:0, ")],
)
def test_a_kernel_that_reaches_far_is_named(run_python: RunPython, offset: int, what: str) -> None:
    done = run_python(
        KERNELS
        + f"y, x = torch.ones(1024, device='npu'), torch.ones(1024, device='npu')\nkernel(lambda: ctypes.memset(x.data_ptr() + {offset}, 1, 1))",
        NPU_DEBUG="memory",
    )
    assert done.returncode == -signal.SIGSEGV
    assert re.search(rf"npu memory check: bad write at 0x\w+ .*{what}.*, in kernel mine::kernel\n", done.stderr), (
        done.stderr
    )


def test_a_use_after_free_is_named(run_python: RunPython) -> None:
    done = run_python(
        KERNELS + "x = torch.ones(1024, device='npu')\naddress = x.data_ptr()\ndel x\n"
        "kernel(lambda: ctypes.string_at(address + 8, 1))",
        NPU_DEBUG="memory",
    )
    assert done.returncode == -signal.SIGSEGV
    assert re.search(
        r"bad read .*, at byte 8 of freed tensor memory of 4096 bytes at 0x\w+ \(use after free\), in kernel mine::kernel",
        done.stderr,
    ), done.stderr


def test_a_write_beside_a_tensor_is_an_error_of_its_kernel(run_python: RunPython) -> None:
    done = run_python(
        KERNELS
        + """
x, y = torch.ones(25, device='npu'), torch.ones(3, device='npu')
print(kernel(lambda: ctypes.memset(x.data_ptr() + 100, 1, 1)))
print(kernel(lambda: ctypes.memset(x.data_ptr() - 16, 1, 16)))
print(repr(kernel(lambda: ctypes.memset(x.data_ptr(), 0, 100))))
print(x.sum().item(), y.sum().item())
""",
        NPU_DEBUG="memory",
    )
    past, before, within, sums = done.stdout.splitlines()
    assert re.fullmatch(
        r"npu memory check: kernel mine::kernel wrote out of bounds: 0 bytes past the end of the tensor memory of 100 bytes "
        r"at 0x\w+ on npu:0",
        past,
    )
    assert "16 bytes before the start of the tensor memory of 100 bytes" in before
    assert within == "''"
    assert sums == "0.0 3.0"


def test_an_op_of_pytorch_raises_it_in_python(run_python: RunPython) -> None:
    done = run_python(
        """
import torch
x = torch.zeros(25, device='npu')
library = torch.library.Library("mine", "DEF")
library.define("stray(Tensor(a!) x) -> ()")
import ctypes
library.impl("stray", lambda x: (ctypes.memset(x.data_ptr() + 100, 7, 4), None)[1], "CPU")
try: torch.ops.mine.stray(x)
except RuntimeError as error: print(error)
print((x + 1).sum().item())
""",
        NPU_DEBUG="memory",
    )
    assert "npu memory check: kernel mine::stray wrote out of bounds: 0 bytes past the end" in done.stdout, done.stderr
    assert done.stdout.endswith("25.0\n")


def test_fresh_and_freed_memory_is_filled(run_python: RunPython) -> None:
    done = run_python(
        "import torch\nx = torch.empty(1000, dtype=torch.uint8, device='npu')\nprint(x.unique().tolist())\n"
        "x.fill_(1)\ndel x\nprint(torch.empty(1000, dtype=torch.uint8, device='npu').unique().tolist())",
        NPU_DEBUG="memory",
    )
    assert done.stdout == "[219]\n[219]\n", done.stderr


def test_what_is_allowed_works(run_python: RunPython) -> None:
    done = run_python(
        """
import io, threading, torch
torch.manual_seed(0)
model = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
device = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to("npu")
device.load_state_dict(model.state_dict())
x = torch.randn(2, 5, 32)
def step():
    device.zero_grad()
    y = device(x.to("npu"))
    y.square().sum().backward()
    return y.detach().cpu()
torch.testing.assert_close(step(), model(x).detach())
threads = [threading.Thread(target=lambda: [torch.randn(50, 50, device="npu").exp().sum().item() for _ in range(50)])
           for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
static = torch.ones(64, 64, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph): result = (static @ static).relu().sum()
static.fill_(2); graph.replay(); print(result.item())
buffer = io.BytesIO(); torch.save(device.state_dict(), buffer); buffer.seek(0)
torch.load(buffer, map_location="npu")
z = torch.arange(10, device="npu"); z.resize_(1000); z.untyped_storage().resize_(16000); print(z[:10].sum().item())
k = torch.zeros(1 << 24, device="npu"); print(k.sum().item(), k.data_ptr() % 64)
print(repr(z[:3]), torch.npu.memory_reserved() == torch.npu.memory_allocated())
torch.npu.faults.lose_device(); torch.npu.faults.reset_device(); print((x.to("npu") * 0).sum().item())
del k; torch.npu.empty_cache()
""",
        NPU_DEBUG="memory",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1048576.0\n45\n0.0 0\ntensor([0, 1, 2], device='npu:0') True\n0.0\n"


def test_faults_and_memory_checks_together(run_python: RunPython) -> None:
    done = run_python(
        "import torch\nx = torch.ones(4, device='npu')\n"
        "try: x + 1\nexcept torch.OutOfMemoryError as error: print(error)\nprint((x + 1).sum().item())",
        NPU_DEBUG="memory,oom@2",
    )
    assert "'oom@2'" in done.stdout
    assert done.stdout.endswith("8.0\n"), done.stderr


GRAPH = (
    KERNELS
    + """
x, graph, kept, offset = torch.ones(25, device='npu'), torch.npu.NPUGraph(), [], None
def reach(name):  # a kernel that writes `offset` bytes past the start of a tensor of 100 bytes that is freed afterwards
    y = x * 2
    def body(address=y.data_ptr()):
        if offset is not None: ctypes.memset(address + offset, 1, 1)
    kept.append(RUN(lambda _: body()))
    table.launch(0, name, kept[-1], None, nothing)
    return y
with torch.npu.graph(graph):
    z = reach(b"mine::first").sum()
    z = z + reach(b"mine::second")[:20].exp().sum() + reach(b"mine::third").sum()
def replayed():
    graph.replay()
    return abs(z.item() - 100 - 20 * 7.389056) < 0.01
"""
)
"""A graph whose tensors are freed during its capture, beside which a replay may write where it must not."""


def test_a_write_beside_memory_that_a_graph_freed_is_an_error_of_its_replay(run_python: RunPython) -> None:
    done = run_python(
        GRAPH
        + """
print(replayed())
for offset in (100, -1):
    try: graph.replay()
    except RuntimeError as error: print(error)
offset = None
print(replayed())
del graph, z
print(torch.npu.memory_allocated(), torch.ones(1 << 20, device='npu').sum().item())
""",
        NPU_DEBUG="memory",
    )
    assert done.returncode == 0, done.stderr
    first, past, before, last, allocated = done.stdout.splitlines()
    assert first == last == "True"
    assert re.match(r"npu memory check: kernel mine::first wrote out of bounds: 0 bytes past the end of the", past)
    assert re.match(
        r"npu memory check: kernel mine::first wrote out of bounds: 1 bytes before the start of the", before
    )
    assert allocated == "512 1048576.0"


def test_a_replay_that_reaches_far_is_named(run_python: RunPython) -> None:
    done = run_python(GRAPH + "offset = 4096\ngraph.replay()", NPU_DEBUG="memory")
    assert done.returncode == -signal.SIGSEGV
    assert re.search(r"bad write .* past the end of .* of 100 bytes at .*, in kernel mine::first\n", done.stderr), (
        done.stderr
    )


def test_graphs_and_pools_work_as_they_do_without_checks(run_python: RunPython) -> None:
    done = run_python(
        """
import torch
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to("npu").eval()
pool = torch.npu.graph_pool_handle()
graphs = []
with torch.inference_mode():
    for tokens in (9, 5, 2):
        x, graph = torch.zeros(2, tokens, 32, device="npu"), torch.npu.NPUGraph()
        with torch.npu.graph(graph, pool=pool): y = layer(layer(x)).sort(-1)[0]
        graphs.append((graph, x, y))
    for graph, x, y in graphs * 2:
        x.copy_(torch.randn(x.shape))
        graph.replay()
        torch.testing.assert_close(y, layer(layer(x)).sort(-1)[0])
held = torch.npu.memory_allocated()
del graph, graphs, x, y
print(torch.npu.memory_allocated() < held, {s["segment_pool_id"] for s in torch.npu.memory_snapshot()} <= {(0, 0)})
memory = torch.npu.MemPool()
with torch.npu.use_mem_pool(memory):
    values = [torch.full((n,), n, device="npu") for n in range(1, 2000, 37)]
    del values[::2]
    values += [torch.full((n,), n, device="npu") for n in range(1, 2000, 53)]
print(all(value.eq(len(value)).all() for value in values))
""",
        NPU_DEBUG="memory",
    )
    assert done.stdout == "True True\nTrue\n", done.stderr


KEEPER = """
import torch
kept = []
def keeper(x, times):
    if not kept: kept.append(torch.ones(1000))
    y = (x * 2).sum()  # what is gone when the kernel ends is no matter
    return x + kept[0][0] * times * (y / y)
library = torch.library.Library("mine", "FRAGMENT")
library.define("keeper(Tensor x, int times) -> Tensor")
library.impl("keeper", keeper, "CPU")
x = torch.ones(3, device="npu")
for times in range(3):
    assert torch.ops.mine.keeper(x, times).tolist() == [1 + times] * 3
x.exp().sort()[0].resize_(100)
torch.randn(8, 8, device="npu") @ torch.randn(8, 8, device="npu")
"""


def test_memory_that_a_kernel_keeps_is_named(run_python: RunPython) -> None:
    done = run_python(KEEPER, NPU_DEBUG="memory")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("npu memory check") == 1, done.stderr
    assert "npu memory check: kernel mine::keeper keeps 4000 bytes" in done.stderr
    assert "outside of kernels" in done.stderr
    done = run_python(KEEPER)
    assert done.returncode == 0, done.stderr
    assert "npu memory check" not in done.stderr
