"""Operators that were once wrong on npu, each as the conformance suite found it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

DEVICE = "npu"


def test_out_argument_on_the_host_is_refused_even_if_it_is_one_value() -> None:
    one = torch.tensor(2.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        torch.mul(one, one, out=torch.empty(()))
    with pytest.raises(RuntimeError, match="same device"):
        torch.copysign(one, one, out=torch.empty(()))


def test_lazy_conjugate_survives_a_copy_to_another_device(run_python) -> None:
    program = """
import torch
import torch.nn.functional as F
x = torch.tensor([1 + 2j, 3 - 4j], device="npu:0")
print(x.conj().to("npu:1").tolist() == [1 - 2j, 3 + 4j], x.imag.neg().to("npu:1").tolist())
print(torch._neg_view(x.imag).to("npu:1").tolist())
"""
    done = run_python(program, NPU_SIMULATOR_DEVICES="2")
    assert done.stdout.split("\n") == ["True [-2.0, 4.0]", "[-2.0, 4.0]", ""], done.stderr


def test_dropout_draws_from_the_devices_generator() -> None:
    x = torch.ones(64, device=DEVICE)
    torch.npu.manual_seed(5)
    first, mask = torch.native_dropout(x, 0.5, True)
    torch.npu.manual_seed(5)
    second, _ = torch.native_dropout(x, 0.5, True)
    assert torch.equal(first, second)
    assert torch.equal(first, mask * 2.0)
    kept, mask = torch.native_dropout(x, 0.5, False)
    assert torch.equal(kept, x)
    assert mask.all()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: F.linear(x, torch.ones(4, 4)),
        lambda x: F.linear(torch.ones(4, 4), x),
        lambda x: F.conv1d(x[None], torch.ones(4, 4, 1)),
        lambda x: F.embedding(torch.tensor([0]), x),
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: x.index_copy(0, torch.tensor([0]), x[:1]),
    ],
)
def test_tensors_of_the_host_are_not_taken_for_those_of_the_device(operation) -> None:
    with pytest.raises(RuntimeError, match=r"same device|device type"):
        operation(torch.ones(4, 4, device=DEVICE))


def test_index_of_the_host_is_taken_as_on_other_accelerators() -> None:
    x = torch.arange(12.0, device=DEVICE).view(4, 3)
    assert torch.equal(x[torch.tensor([1, 3])].cpu(), x.cpu()[[1, 3]])
    x[torch.tensor([0])] = 7.0
    assert x[0].tolist() == [7, 7, 7]
    x[torch.tensor([1])] = torch.tensor(8.0)
    assert x[1].tolist() == [8, 8, 8]
    x[torch.tensor([True, False, False, True])] = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    assert x[3].tolist() == [1, 2, 3]


def assign(target: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    target[index] = values


@pytest.mark.parametrize("index", [torch.tensor([0, 2]), torch.tensor([True, False, True])], ids=["positions", "mask"])
def test_tensors_of_two_devices_in_an_indexing_are_refused_as_on_other_accelerators(index: torch.Tensor) -> None:
    host, device, places, values = torch.zeros(3), torch.zeros(3, device=DEVICE), index.to(DEVICE), torch.ones(2)
    for operation in (
        lambda: host[places],
        lambda: assign(host, places, values),
        lambda: assign(host, places, torch.tensor(1.0)),
        lambda: torch.ops.aten._unsafe_index(host, [torch.tensor([0, 2], device=DEVICE)]),
    ):
        with pytest.raises(RuntimeError, match=r"indices should be either on cpu or on the same device.*\(cpu\)"):
            operation()
    for operation in (
        lambda: assign(host, index, values.to(DEVICE)),
        lambda: assign(device, places, values),
        lambda: assign(device, index, values),
        lambda: device.index_put((places,), values, accumulate=True),
        lambda: torch.ops.aten.index.Tensor_out(device, [places], out=torch.empty(2)),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            operation()
    assert host.sum() == device.sum() == 0


INDEX = torch.zeros(1, 2, dtype=torch.int64)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("operation", "layout"),
    [
        (lambda x: x.to_sparse(), "Sparse"),
        (lambda x: x.to_sparse_csr(), "Sparse"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "QInt8"),
        (lambda x: x.cpu().to_sparse().to(DEVICE), "sparse"),
        (lambda x: torch.sparse_coo_tensor(INDEX, [1.0, 2.0], device=DEVICE), "sparse"),
        (lambda x: x.cpu().to_sparse_csr().to(DEVICE) @ x, "sparse compressed"),
        (lambda x: torch.empty_like(x, layout=torch.sparse_coo), "sparse"),
        (lambda x: F.embedding(INDEX.to(DEVICE), x.requires_grad_(), sparse=True).sum().backward(), "sparse"),
        (lambda x: x.requires_grad_().gather(0, INDEX.to(DEVICE), sparse_grad=True).sum().backward(), "sparse"),
        (lambda x: torch.nested.nested_tensor([x, x], device=DEVICE).sum(), "nested"),
        (lambda x: torch.empty(2, dtype=torch.qint8, device=DEVICE), "quantized"),
    ],
)
def test_tensors_of_other_layouts_are_refused_in_one_line(operation, layout: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^npu: its tensors are dense.*{layout}.*\.cpu\(\)$"):
        operation(torch.ones(2, 2, device=DEVICE))


def test_the_most_frequent_value_with_out_arguments() -> None:
    x = torch.tensor([[3, 1, 3], [2, 2, 1]], device=DEVICE)
    out = torch.empty(0, dtype=torch.int64, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    values, places = torch.mode(x, out=out)
    assert values.tolist() == [3, 2]
    assert values.data_ptr() == out[0].data_ptr()
    assert torch.equal(x.gather(1, places[:, None])[:, 0], values)


def test_layer_norm_gives_the_digits_of_the_cpu() -> None:
    x = torch.randn(5, 1)
    assert torch.equal(F.layer_norm(x.to(DEVICE), (1,)).cpu(), F.layer_norm(x, (1,)))


def test_backward_is_captured_with_the_forward() -> None:
    x, w = torch.randn(4, 4, device=DEVICE), torch.randn(4, 4, device=DEVICE, requires_grad=True)
    torch.autograd.grad((x @ w).sin().sum(), w)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        (captured,) = torch.autograd.grad((x @ w).sin().sum(), w)
    x.copy_(torch.randn(4, 4))
    graph.replay()
    (expected,) = torch.autograd.grad((x @ w).sin().sum(), w)
    assert torch.equal(captured, expected)
    assert torch.autograd.is_multithreading_enabled()


def test_copy_between_overlapping_parts_of_a_tensor_is_refused() -> None:
    x = torch.arange(9.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="single memory location"):
        x[1:].copy_(x[:-1])
    assert x.copy_(x).tolist() == list(range(9))


def test_uninitialized_memory_is_filled_where_results_are_to_be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2), device=DEVICE).isnan().all()
        assert torch.ones(2, device=DEVICE).resize_(1000)[:4].nan_to_num(5.0).tolist() == [1, 1, 5, 5]
    finally:
        torch.use_deterministic_algorithms(False)


def test_generator_of_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="'npu' device type for generator"):
        torch.rand(3, device=DEVICE, generator=torch.Generator())
    seeded = [torch.rand(3, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) for _ in range(2)]
    assert torch.equal(*seeded)


@pytest.mark.parametrize("left", [True, False])
def test_a_result_that_its_kernel_leaves_conjugated_stays_so(left: bool) -> None:
    factors, pivots = torch.linalg.lu_factor(torch.randn(3, 3, dtype=torch.complex128))
    right_side = torch.randn((3, 4) if left else (4, 3), dtype=torch.complex128)
    expected = torch.linalg.lu_solve(factors, pivots, right_side, left=left)
    result = torch.linalg.lu_solve(factors.to("npu"), pivots.to("npu"), right_side.to("npu"), left=left)
    assert expected.is_conj() == result.is_conj() == (not left)
    torch.testing.assert_close(result.cpu(), expected)


def test_conjugation_in_place_of_a_complex_tensor() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(x.to(DEVICE).conj_physical_().cpu(), x.conj_physical())


def test_derivatives_of_a_linear_layer_of_complex_numbers() -> None:
    def tangent_and_gradients(device: str) -> list[torch.Tensor]:
        x, w = (each.detach().to(device).requires_grad_() for each in values)
        _, tangent = torch.func.jvp(torch.nn.functional.linear, (x, w), (x.detach(), w.detach()))
        y = torch.nn.functional.linear(x, w)
        return [each.cpu() for each in (tangent, *torch.autograd.grad(y, (x, w), torch.ones_like(y)))]

    values = torch.randn(4, 5, dtype=torch.complex64), torch.randn(3, 5, dtype=torch.complex64)
    torch.testing.assert_close(tangent_and_gradients(DEVICE), tangent_and_gradients("cpu"))


@pytest.mark.parametrize("registered_first", [True, False])
def test_a_kernel_for_the_out_variant_serves_the_whole_op(registered_first: bool) -> None:
    x = torch.full((3,), 2.0, device=DEVICE)
    if not registered_first:
        assert x.sinh().tolist() == torch.full((3,), 2.0).sinh().tolist()
    calls = []

    def answer(tensor: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return out.fill_(42.0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("sinh.out", answer, "PrivateUse1")
    try:
        assert x.sinh().tolist() == [42.0] * 3
        assert x.clone().sinh_().tolist() == [42.0] * 3
        assert len(calls) == 2
    finally:
        library._destroy()
    assert x.sinh().tolist() == torch.full((3,), 2.0).sinh().tolist()


def test_an_op_that_takes_the_place_of_another_is_not_taken_for_it() -> None:
    """The kernel stays registered, and so its place in the dispatcher, while the definition is another one."""
    kernels = torch.library.Library("npu_tests_replaced", "IMPL")
    x, y = torch.ones(3, device=DEVICE), torch.full((3,), 2.0, device=DEVICE)
    for schema, arguments, expected in (
        ("total(Tensor a) -> Tensor", (x,), 1),
        ("total(Tensor a, Tensor b) -> Tensor", (x, y), 3),
        ("total(Tensor a, float factor, Tensor b) -> Tensor", (x, 5.0, y), 8),
    ):
        with torch.library._scoped_library("npu_tests_replaced", "FRAGMENT") as definition:
            definition.define(schema)
            if expected == 1:
                kernels.impl("total", lambda *all_of_them: sum(all_of_them), "CPU")
            result = torch.ops.npu_tests_replaced.total(*arguments)
            assert result.device.type == "npu"
            assert result.tolist() == [expected] * 3
    kernels._destroy()


def test_lists_of_many_tensors() -> None:
    """Beyond a few, tensors are found by a table: the same one twice, views of one storage, results that are arguments."""
    host = [torch.randn(3) for _ in range(200)]
    flat = torch.randn(600)
    host += [*flat.view(200, 3), *host[:10]]
    device_flat = flat.to(DEVICE)
    device = [tensor.to(DEVICE) for tensor in host[:200]]
    device += [*device_flat.view(200, 3), *device[:10]]
    for mine, theirs in zip(torch._foreach_mul(device, 2.0), torch._foreach_mul(host, 2.0), strict=True):
        assert torch.equal(mine.cpu(), theirs)
    torch._foreach_add_(device, 1.0)
    torch._foreach_add_(host, 1.0)
    for mine, theirs in zip(device, host, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(device_flat.cpu(), flat)
    torch._foreach_copy_(device, [torch.full((3,), float(i)) for i in range(len(device))])
    assert [tensor[0].item() for tensor in device[10:]] == list(range(10, 410))


@pytest.mark.skipif("NPU_DEBUG" in os.environ, reason="it reads device memory on the host")
@pytest.mark.parametrize("count", [3, 300])
def test_a_kernel_may_keep_views_of_its_arguments(count: int) -> None:
    kept: list[torch.Tensor] = []

    def keep(tensors: list[torch.Tensor]) -> torch.Tensor:
        kept.extend(tensor.view(-1) for tensor in tensors)
        return tensors[0] + 1

    with torch.library._scoped_library("npu_tests_kept", "FRAGMENT") as library:
        library.define("keep(Tensor[] tensors) -> Tensor")
        library.impl("keep", keep, "CPU")
        flat = torch.arange(2.0 * count, device=DEVICE)
        assert torch.ops.npu_tests_kept.keep(list(flat.view(count, 2))).tolist() == [1, 2]
        del flat
    others = [torch.full((2 * count,), 7.0, device=DEVICE) for _ in range(4)]
    assert len(others) == 4
    assert [view.tolist() for view in kept] == [[2.0 * i, 2.0 * i + 1] for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize(("bins", "low", "high"), [(16, 0, 15), (5, 10, 99), (7, 0, 0), (4, 6, 6)])
def test_histograms_of_integers_as_on_other_accelerators(dtype: torch.dtype, bins: int, low: int, high: int) -> None:
    """The CPU has those of floats alone; transformers counts the tokens of each expert so."""
    values = torch.randint(0, 120, (300,), generator=torch.Generator().manual_seed(1)).to(dtype)
    counted = torch.histc(values.to(DEVICE), bins=bins, min=low, max=high)
    if low == high:
        low, high = int(values.min()), int(values.max())
    places = [min((x - low) * bins // (high - low), bins - 1) for x in values.tolist() if low <= x <= high]
    assert counted.dtype == dtype
    assert counted.tolist() == torch.bincount(torch.tensor(places), minlength=bins).tolist()


def test_a_histogram_of_integers_in_a_graph() -> None:
    values = torch.tensor([1, 2, 2, 9, 3], dtype=torch.int32, device=DEVICE)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        counted = torch.histc(values, bins=4, min=0, max=3)
    for now, expected in (([0, 0, 0, 3, 9], [3, 0, 0, 1]), ([9] * 5, [0] * 4)):
        values.copy_(torch.tensor(now))
        graph.replay()
        assert counted.tolist() == expected


def test_a_histogram_of_no_integers_and_of_one() -> None:
    assert torch.histc(torch.empty(0, dtype=torch.int32, device=DEVICE), bins=3, min=0, max=2).tolist() == [0, 0, 0]
    assert torch.histc(torch.tensor([3, 3], device=DEVICE), bins=4).tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize(("bins", "low", "high", "wrong"), [(0, 0, 1, "bins"), (4, 5, 1, "max")])
def test_wrong_bins_of_integers_are_refused(bins: int, low: int, high: int, wrong: str) -> None:
    with pytest.raises(RuntimeError, match=wrong):
        torch.histc(torch.tensor([3], device=DEVICE), bins=bins, min=low, max=high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_groups_are_one_kernel_that_a_graph_replays(dtype: torch.dtype) -> None:
    """Experts by tokens: the ends of the groups, which the kernel reads, are others at each replay."""
    generator = torch.Generator().manual_seed(1)
    rows, weights = torch.randn(24, 64, generator=generator), torch.randn(6, 32, 64, generator=generator)
    rows, weights = rows.to(dtype), weights.to(dtype)
    ends = torch.tensor([4, 4, 10, 11, 20, 24], dtype=torch.int32)
    on_device = [tensor.to(DEVICE) for tensor in (rows, weights, ends)]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        products = F.grouped_mm(on_device[0], on_device[1].mT, offs=on_device[2])
    for now in ([0, 0, 0, 0, 0, 24], [24] * 6, [1, 2, 3, 4, 5, 24], ends.tolist()):
        ends.copy_(torch.tensor(now))
        on_device[2].copy_(ends)
        graph.replay()
        assert torch.equal(products.cpu(), F.grouped_mm(rows, weights.mT, offs=ends))
