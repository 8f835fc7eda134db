"""torch.compile with Inductor: the values of eager mode, from fused kernels that are launches of the device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import DeviceType

from tests.support.llama_block import LlamaBlock

DEVICE = "npu"
# One fused kernel; compiled once for the tests that look at launches.
FUSED = "def fused(x): return x.sin() * 2 + x.cos()"


@pytest.fixture(autouse=True)
def _no_earlier_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fused(x: Tensor) -> Tensor:
    return x.sin() * 2 + x.cos()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.nightly
def test_decoder_layer_forward_and_backward_over_dynamic_shapes() -> None:
    block = LlamaBlock().to(DEVICE)
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for batch, tokens in ((2, 9), (3, 17)):
        x, positions = random(batch, tokens, 64), torch.arange(tokens, device=DEVICE)
        results = []
        for module in (compiled, block):
            given = x.clone().requires_grad_()
            torch._dynamo.mark_dynamic(given, [0, 1])
            torch._dynamo.mark_dynamic(positions, 0)
            y = module(given, positions)
            module.zero_grad()
            y.square().mean().backward()
            results.append([y, given.grad, *(parameter.grad for parameter in module.parameters())])
        torch.testing.assert_close(*results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1


def operations(x: Tensor, rows: Tensor, host_value: Tensor, running: Tensor) -> tuple[Tensor, ...]:
    running.mul_(0.9).add_(x.mean(0), alpha=0.1)
    x[::2].copy_(x[::2] * 2)
    table = torch.zeros(5, x.shape[1], device=x.device)
    return (
        x * host_value,
        x.softmax(-1) + x.var(1, keepdim=True),
        (x.t() + 1).contiguous().relu(),
        x.t().logsumexp(0),
        x.argmax(-1),
        x.cumsum(1),
        x.sort(-1).values * 2,
        table.index_add(0, rows, x),
        table.index_put((rows,), x, accumulate=True),
        x[rows].to(torch.float16) * 2,
        rows * 3 // 2,
        torch.linalg.inv(x @ x.t() + 9 * torch.eye(5, device=x.device)).abs(),
    )


def test_operations_fused_and_left_to_the_device() -> None:
    x, running = random(5, 24), random(24)
    rows, host_value = torch.tensor([1, 0, 3, 1, 4], device=DEVICE), torch.tensor(2.5)
    expected_x, expected_running = x.clone(), running.clone()
    expected = operations(expected_x, rows, host_value, expected_running)
    before = torch.npu.launch_counts()
    results = torch.compile(operations, fullgraph=True)(x, rows, host_value, running)
    kernels, fallbacks = (now - then for now, then in zip(torch.npu.launch_counts(), before, strict=True))
    torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close((x, running), (expected_x, expected_running))
    assert {result.device for result in results} == {torch.device("npu:0")}
    assert 0 < fallbacks < kernels


def test_convolution_with_statistics_trains() -> None:
    eager = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).to(DEVICE)
    other = copy.deepcopy(eager)
    x = random(2, 3, 8, 8)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        losses = [module(x).float().square().mean() for module in (torch.compile(other), eager)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(other[1].running_var, eager[1].running_var, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(other[0].weight.grad, eager[0].weight.grad, rtol=5e-2, atol=5e-2)


SIZES = {1: (2, 8, 7), 2: (2, 8, 6, 6), 3: (2, 8, 5, 5, 5)}
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def strides_of_convolution(dims: int, transposed: bool, last: tuple[bool, bool]) -> list[tuple[int, ...]]:
    tensors = [random(*SIZES[dims]), random(8, 8, *[3] * dims)]
    if dims in CHANNELS_LAST:
        layouts = [CHANNELS_LAST[dims] if each else torch.contiguous_format for each in last]
        tensors = [each.to(memory_format=layout) for each, layout in zip(tensors, layouts, strict=True)]
    geometry = ([1] * dims, [0] * dims, [1] * dims, transposed, [0] * dims, 1)
    result = torch.ops.aten.convolution(*tensors, None, *geometry)
    grads = torch.ops.aten.convolution_backward(torch.ones_like(result), *tensors, [8], *geometry, [True] * 3)
    assert {each.device for each in (result, *grads)} == {torch.device("npu:0")}
    return [each.stride() for each in (result, *grads)]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("last", list(itertools.product([False, True], repeat=2)))
def test_compiled_code_expects_the_layout_that_a_convolution_gives(
    dims: int, transposed: bool, last: tuple[bool, bool]
) -> None:
    with FakeTensorMode():
        expected = strides_of_convolution(dims, transposed, last)
    assert strides_of_convolution(dims, transposed, last) == expected


@pytest.mark.nightly
def test_convolutions_of_channels_last_train() -> None:
    eager = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).to(DEVICE)
    eager = eager.to(memory_format=torch.channels_last)
    other, x = copy.deepcopy(eager), random(2, 3, 8, 8).to(memory_format=torch.channels_last)
    results = [module(x) for module in (torch.compile(other), eager)]
    assert results[0].stride() == results[1].stride()
    torch.testing.assert_close(*results)
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(other[0].weight.grad, eager[0].weight.grad)


def test_torch_takes_convolutions_of_npu_for_contiguous() -> None:
    """The reason for torch_npu/fake_convolutions.py, which can go when this fails."""
    x, weight = (random(*sizes).to(memory_format=torch.channels_last) for sizes in (SIZES[2], (8, 8, 3, 3)))
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    backend = torch._C._select_conv_backend(x, weight, None, *geometry)
    assert torch._C._conv_determine_backend_memory_format(x, weight, backend) == torch.contiguous_format


def draw(x: Tensor) -> tuple[Tensor, Tensor]:
    dropped = F.dropout(x, 0.5)
    torch._dynamo.graph_break()
    return dropped, torch.rand_like(x)


def test_random_numbers_come_from_the_devices_seed() -> None:
    x = torch.ones(10_000, device=DEVICE)
    compiled = torch.compile(draw)
    torch.npu.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.npu.manual_seed(3)
    torch.testing.assert_close(compiled(x), first, rtol=0, atol=0)
    assert not torch.equal(first[1], second[1])
    assert first[0].unique().tolist() == [0, 2]
    assert first[1].mean().item() == pytest.approx(0.5, abs=0.05)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        dropped, _ = compiled(x)
    graph.replay()
    before = dropped.clone()
    graph.replay()
    assert not torch.equal(dropped, before)


def test_fused_kernel_is_a_launch_of_the_device() -> None:
    compiled, x = torch.compile(fused), random(1000)
    compiled(x)
    held, before = torch.npu.memory_allocated(), torch.npu.launch_counts()
    with torch.profiler.profile() as profile:
        y = compiled(x)
    assert torch.npu.launch_counts() == (before[0] + 1, before[1])
    assert torch.npu.memory_allocated() == held + 4096
    on_device = {event.name for event in profile.events() if event.device_type == DeviceType.PrivateUse1}
    assert "cpp_fused_add_cos_mul_sin_0" in on_device
    torch.testing.assert_close(y, fused(x))
    with (
        torch.npu.faults.fail_kernel("cpp_fused_add_cos_mul_sin_0"),
        pytest.raises(RuntimeError, match="cpp_fused_add_cos_mul_sin_0"),
    ):
        compiled(x)


def test_compiled_functions_are_captured_and_replayed() -> None:
    compiled, x = torch.compile(fused), random(1000)
    compiled(x)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = compiled(x)
    x.copy_(random(1000))
    graph.replay()
    torch.testing.assert_close(y, fused(x))
    graphed = torch.npu.make_graphed_callables(compiled, (torch.zeros(1000, device=DEVICE),))
    torch.testing.assert_close(graphed(x), fused(x))


def test_value_of_the_host_cannot_be_captured() -> None:
    compiled, x = torch.compile(lambda x, value: x * value), random(3)
    torch.testing.assert_close(compiled(x, torch.tensor(2.0)), x * 2)
    with pytest.raises(RuntimeError, match="host is not permitted while a graph is captured"):  # noqa: SIM117
        with torch.npu.graph(torch.npu.NPUGraph()):
            compiled(x, torch.tensor(2.0))


PROGRAM = f"""
import torch
{FUSED}
x = torch.linspace(0, 1, 1000, device="npu:1")
y = torch.compile(fused)(x)
print(y.device, torch.allclose(y, fused(x)), torch.npu.current_device())
try: torch.compile(lambda a, b: a // b)(torch.tensor([4], device="npu"), torch.tensor([0], device="npu"))
except RuntimeError as error: print("ZeroDivisionError" in str(error))
"""


def test_checked_memory_and_several_devices(run_python) -> None:
    done = run_python(PROGRAM, NPU_DEBUG="memory", NPU_SIMULATOR_DEVICES="2")
    assert done.stdout.split() == ["npu:1", "True", "0", "True"], done.stderr


def test_out_of_memory_in_compiled_code_is_the_same_error() -> None:
    compiled = torch.compile(lambda x: (x[:, None] + x[None, :]).relu(), dynamic=True)
    compiled(random(64))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4096.00 GiB"):
        compiled(random(1 << 20))
    assert compiled(random(8)).shape == (8, 8)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"mode": "reduce-overhead"}, "make_graphed_callables"),
        ({"mode": "max-autotune"}, "make_graphed_callables"),
        ({"options": {"cpp_wrapper": True}}, "leave cpp_wrapper"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, object], remedy: str) -> None:
    with pytest.raises(torch._inductor.exc.InductorError, match=remedy):
        torch.compile(fused, **options)(random(3))
