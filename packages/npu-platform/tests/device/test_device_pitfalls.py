"""The thirteen pitfalls of a PrivateUse1 backend (reference/device.md 1.4), each as it was met."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

DEVICE = "npu"
PACKAGES = Path(__file__).parents[3]


def test_01_linear_has_its_backward() -> None:
    host = torch.nn.Linear(8, 4)
    device = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(3, 5, 8)
    host(x).square().sum().backward()
    device(x.to(DEVICE)).square().sum().backward()
    torch.testing.assert_close(device.weight.grad.cpu(), host.weight.grad)
    torch.testing.assert_close(device.bias.grad.cpu(), host.bias.grad)


def test_02_ops_work_inside_autocast() -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        result = F.linear(torch.ones(2, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)).relu().sum()
    assert result.item() == 24


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, torch._neg_view, lambda t: t.conj().imag])
def test_03_lazy_conjugates_and_negatives_can_be_copied(lazy) -> None:
    host = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(lazy(host.to(DEVICE)).cpu(), lazy(host))
    assert torch.equal(lazy(host.to(DEVICE)).clone().cpu(), lazy(host).clone())
    target = torch.zeros_like(lazy(host).resolve_conj().resolve_neg(), device=DEVICE)
    assert torch.equal(target.copy_(lazy(host.to(DEVICE))).cpu(), lazy(host))


def test_04_views_made_by_cpu_kernels_take_in_place_ops() -> None:
    x = torch.zeros(3, 4, device=DEVICE)
    pairs = torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2)))
    for view in (x.t(), x.diagonal(), x.expand(2, 3, 4)[0], x.chunk(2, 1)[1], pairs):
        view.add_(1)
        view.detach().mul_(1)
    assert x.sum().item() == 12 + 3 + 12 + 6 + 12
    y = x.clone().requires_grad_()
    (y.t()[1:] * 2).sum().backward()
    assert y.grad.sum().item() == 18


@pytest.mark.parametrize(("kind", "shape"), [(torch.nn.Conv2d, (2, 3, 8, 8)), (torch.nn.ConvTranspose2d, (2, 3, 5, 5))])
def test_05_convolutions_forward_and_backward(kind: type, shape: tuple[int, ...]) -> None:
    host = kind(3, 4, 3, stride=2, padding=1)
    device = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(shape)
    y = x.to(DEVICE).requires_grad_()
    x.requires_grad_()
    host(x).square().sum().backward()
    device(y).square().sum().backward()
    torch.testing.assert_close(y.grad.cpu(), x.grad)
    torch.testing.assert_close(device.weight.grad.cpu(), host.weight.grad)
    torch.testing.assert_close(device.bias.grad.cpu(), host.bias.grad)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
@pytest.mark.parametrize("bias", [True, False])
def test_05_recurrent_cells_forward_and_backward(kind: type, bias: bool) -> None:
    host = kind(4, 6, num_layers=2, bias=bias)
    device = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(5, 3, 4)
    y = x.to(DEVICE).requires_grad_()
    x.requires_grad_()
    expected, _ = host(x)
    result, _ = device(y)
    torch.testing.assert_close(result.cpu(), expected)
    expected.square().sum().backward()
    result.square().sum().backward()
    torch.testing.assert_close(y.grad.cpu(), x.grad)
    for mine, theirs in zip(device.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.nn.LSTM, {"proj_size": 3}),
        (torch.nn.LSTM, {"bidirectional": True}),
        (torch.nn.GRU, {"bidirectional": True}),
    ],
)
def test_05_recurrent_layers_over_packed_sequences(kind: type, options: dict[str, object]) -> None:
    host = kind(4, 6, num_layers=2, **options)
    device = copy.deepcopy(host).to(DEVICE)
    x, lengths = torch.randn(5, 3, 4), torch.tensor([5, 3, 2])
    expected, state = host(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))
    result, device_state = device(torch.nn.utils.rnn.pack_padded_sequence(x.to(DEVICE), lengths))
    torch.testing.assert_close(result.data.cpu(), expected.data)
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(result)
    assert padded.device.type == "npu"
    torch.testing.assert_close(device_state[0].cpu(), state[0])


@pytest.mark.parametrize("side", ["input", "weight"])
def test_05_convolutions_keep_the_memory_format(side: str) -> None:
    host = torch.nn.Conv2d(3, 8, 3)
    x = torch.randn(2, 3, 9, 9)
    if side == "input":
        x = x.to(memory_format=torch.channels_last)
    else:
        host.to(memory_format=torch.channels_last)
    device = copy.deepcopy(host).to(DEVICE)
    y = x.to(DEVICE).requires_grad_()
    x.requires_grad_()
    expected, result = host(x), device(y)
    assert result.stride() == expected.stride()
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.cpu(), expected)
    expected.square().sum().backward()
    result.square().sum().backward()
    assert y.grad.stride() == x.grad.stride()
    torch.testing.assert_close(y.grad.cpu(), x.grad)
    torch.testing.assert_close(device.weight.grad.cpu(), host.weight.grad)


@pytest.mark.usefixtures("clean_memory")
def test_06_scratch_through_the_raw_allocator_stays_counted_in_replays() -> None:
    base = torch.npu.memory_allocated()
    x = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(512, 256, device=DEVICE, dtype=torch.bfloat16)
    image = torch.randn(1, 8, 32, 32, device=DEVICE)
    kernel = torch.randn(8, 8, 3, 3, device=DEVICE)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y, z = F.linear(x, w), F.conv2d(image, kernel)
    held = torch.npu.memory_allocated()
    for _ in range(5):
        graph.replay()
        assert torch.npu.memory_allocated() == held
    torch.testing.assert_close(y, F.linear(x, w))
    torch.testing.assert_close(z, F.conv2d(image, kernel))
    del graph, x, w, y, z, image, kernel
    assert torch.npu.memory_allocated() == base


def test_07_events_tell_the_time_between_them() -> None:
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    assert isinstance(start, torch.npu.Event)
    start.record()
    torch.randn(200, 200, device=DEVICE).inverse()
    end.record(torch.npu.current_stream())
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0


def test_08_graphs_are_registered_under_the_upper_case_name() -> None:
    assert isinstance(torch.accelerator.Graph(), torch.accelerator.Graph)
    assert issubclass(torch.npu.NPUGraph, torch.accelerator.Graph)


def _double(queue: mp.Queue, results: mp.Queue) -> None:
    tensor, parameter = queue.get()
    results.put((tensor * 2, type(parameter).__name__, parameter.requires_grad))
    queue.get()  # stay until the result was read: its shared memory is served from here


def test_09_queues_carry_npu_tensors() -> None:
    context = mp.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    process = context.Process(target=_double, args=(queue, results))
    process.start()
    queue.put((torch.arange(6, device=DEVICE).view(2, 3).t(), torch.nn.Parameter(torch.ones(2, device=DEVICE))))
    doubled, kind, requires_grad = results.get(timeout=240)
    queue.put(None)
    process.join()
    assert doubled.device.type == "npu"
    assert doubled.tolist() == [[0, 6], [2, 8], [4, 10]]
    assert (kind, requires_grad) == ("Parameter", True)


def test_10_everything_that_computes_goes_through_one_door() -> None:
    x, grows = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    for operation in (
        lambda: x + 1,
        lambda: grows.resize_(4096),
        lambda: grows.untyped_storage().resize_(1 << 16),
        x.zero_,
        lambda: x.copy_(torch.ones(4)),
        x.cpu,
        lambda: F.linear(x, x),
        lambda: x.sum().item(),
        lambda: torch.ones(4, device=DEVICE),
    ):
        before = torch.npu.launch_counts()[0]
        operation()
        assert torch.npu.launch_counts()[0] > before


TILE_CONFIGURATION = """
#include <immintrin.h>
struct alignas(64) Tiles {{ unsigned char palette, start_row, reserved[14]; unsigned short colsb[16]; unsigned char rows[16]; }};
void configure(int rows) {{
  Tiles tiles{{}};
  tiles.palette = 1;
  for (int i = 0; i < 8; ++i) {{ tiles.colsb[i] = 64; tiles.rows[i] = (unsigned char)rows; }}
  {barrier}
  _tile_loadconfig(&tiles);
}}
"""
BARRIER = 'asm volatile("" :: "r"(&tiles) : "memory");'


def test_11_tile_configuration_is_not_optimised_away(tmp_path: Path) -> None:
    """GCC 12 drops stores to what _tile_loadconfig reads; with the barrier they stay, and no source of ours lacks it."""
    source, assembly = tmp_path / "tiles.cpp", tmp_path / "tiles.s"
    source.write_text(TILE_CONFIGURATION.format(barrier=BARRIER))
    subprocess.run(["c++", "-O2", "-mamx-tile", "-S", str(source), "-o", str(assembly)], check=True)
    before_load, load, _after = assembly.read_text().partition("ldtilecfg")
    assert load
    assert re.search(r"%(edi|dil)\b", before_load), f"the rows, an argument, are not stored:\n{before_load}"
    sources = [path for kind in ("cpp", "h", "inc") for path in PACKAGES.glob(f"*/csrc/**/*.{kind}")]
    assert sources
    for path in sources:
        for before, _load in itertools.pairwise(path.read_text().split("_tile_loadconfig")):
            assert re.search(r'asm volatile\(""\s*::?\s*:?\s*"r"\(&\w+\) : "memory"\);\s*$', before), (
                f"{path}: no barrier"
            )


def test_12_huge_pages_are_for_large_memory_and_can_be_switched_off(run_python) -> None:
    program = """
import torch
small = torch.ones(1 << 20, device="npu")
large = torch.ones(64 << 20, device="npu")
def advised(tensor):
    inside = False
    for line in open("/proc/self/smaps"):
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            low, high = (int(end, 16) for end in head[0].split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and head[0] == "VmFlags:":
            return "hg" in head
print(advised(small), advised(large))
"""
    default = run_python(program)
    assert default.stdout.split() == ["False", "True"], default.stderr
    assert run_python(program, NPU_HUGE_PAGES="0").stdout.split() == ["False", "False"]


def test_13_no_top_level_package_is_called_torch_npu() -> None:
    assert importlib.util.find_spec("torch_npu") is None
    assert Path(torch.npu.__file__).parent.name == "torch_npu"
    assert torch.npu.__name__ == "npu_platform.torch_npu"


def test_threads_share_weights_without_harm() -> None:
    weight = torch.randn(32, 32, device=DEVICE)
    expected = (weight @ weight).cpu()
    base = torch.npu.memory_allocated()
    barrier = threading.Barrier(4)

    def work(_: int) -> bool:
        barrier.wait()
        right = True
        for _ in range(200):
            result = torch.cat([weight @ weight, weight])[:32]
            result.add_(1).sub_(1)
            right &= torch.allclose(result.cpu(), expected, atol=1e-4)
        return right

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert torch.npu.memory_allocated() == base
