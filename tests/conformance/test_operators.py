"""PyTorch's operator database on npu, each operator over every dtype of the CPU: what npu shows is what the CPU shows.

Instantiated by PyTorch's own machinery for device types. What is not supported, and why, is in skips.toml.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase, noncontiguous_like
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from tests.support.operators import UNDEFINED, call, differentiable, moved, samples
from tests.support.parity import as_on_cpu, attempt, devices_of, see, shares_memory, without_values

REFERENCES = 10
ONE_OF_EACH = (torch.float32, torch.int64)
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


class TestOperators(TestCase):
    @ops(op_db, dtypes=OpDTypes.supported)
    @as_on_cpu
    def test_forward_and_backward(self, device: str, dtype: torch.dtype, op: OpInfo) -> Iterator[Any]:
        for sample in samples(op, device, dtype, differentiable=differentiable(op, dtype)):
            yield from results_and_gradients(op, sample, device)

    @ops(op_db, allowed_dtypes=ONE_OF_EACH)
    @as_on_cpu
    def test_reference_inputs(self, device: str, dtype: torch.dtype, op: OpInfo) -> Iterator[Any]:
        for sample in moved(itertools.islice(op.reference_inputs("cpu", dtype), REFERENCES), device, op):
            yield attempt(lambda sample=sample: call(op, sample)) if op.name not in UNDEFINED else 0

    @ops(op_db, allowed_dtypes=(torch.float32,))
    @as_on_cpu
    def test_noncontiguous_inputs(self, device: str, dtype: torch.dtype, op: OpInfo) -> Iterator[Any]:
        for sample in samples(op, device, dtype, differentiable=differentiable(op, dtype)):
            yield from results_and_gradients(op, sample.noncontiguous(), device)

    @ops([op for op in op_db if op.supports_autograd], allowed_dtypes=(torch.float32,))
    @as_on_cpu
    def test_channels_last(self, device: str, dtype: torch.dtype, op: OpInfo) -> Iterator[Any]:
        for sample in samples(op, device, dtype, differentiable=True, most=20):
            if isinstance(sample.input, Tensor) and sample.input.dim() in LAYOUTS:
                yield from results_and_gradients(op, sample.transform(in_channels_last), device)

    @ops([op for op in op_db if op.supports_out], allowed_dtypes=(torch.float32, torch.int64, torch.complex64))
    @as_on_cpu
    def test_out(self, device: str, dtype: torch.dtype, op: OpInfo) -> Iterator[Any]:
        for sample in samples(op, device, dtype, most=2):
            for make_out in (torch.empty_like, noncontiguous, of_no_elements, of_another_dtype):
                yield attempt(lambda sample=sample, make_out=make_out: call_with_out(op, sample, make_out))
            yield device == "cpu" or refuses(lambda sample=sample: call_with_out(op, sample, on_the_host))

    @ops(op_db, allowed_dtypes=(torch.float32, torch.int64, torch.bool))
    @as_on_cpu
    def test_variants(self, device: str, dtype: torch.dtype, op: OpInfo) -> Iterator[Any]:
        variants = [op.get_method(), op.get_operator(), *(alias.op for alias in op.aliases)]
        in_place = [op.get_inplace(), op.get_inplace_operator(), *(alias.inplace_variant for alias in op.aliases)]
        for sample in samples(op, device, dtype, most=2):
            if not isinstance(sample.input, Tensor) or op.name in UNDEFINED:
                continue
            for variant in filter(None, variants):
                yield attempt(lambda sample=sample, variant=variant: call(variant, sample))
            for variant, prepare in itertools.product(filter(None, in_place), (torch.clone, noncontiguous)):
                yield attempt(lambda s=sample, v=variant, prepare=prepare: call_in_place(v, s, prepare))

    @ops([op for op in op_db if op.error_inputs_func is not None], dtypes=OpDTypes.none)
    @as_on_cpu
    def test_error_inputs(self, device: str, op: OpInfo) -> Iterator[Any]:
        # Those of the CPU, on either device: for other devices the database leaves some out, and adds some.
        errors = list(op.error_inputs("cpu"))
        for error, sample in zip(errors, moved((each.sample_input for each in errors), device, op), strict=True):
            yield refuses(lambda sample=sample: call(op, sample), error.error_type)
        own = list(op.error_inputs(device))
        for error in own if len(own) > len(errors) else ():
            assert refuses(lambda error=error: call(op, error.sample_input), error.error_type), error.error_regex


def results_and_gradients(op: OpInfo, sample: SampleInput, device: str) -> Iterator[Any]:
    """Observe the results on a sample, where they lie, and the gradients of the sample's tensors."""
    inputs = [sample.input, sample.args, sample.kwargs]
    kept: list[Any] = []

    def forward() -> Any:
        kept.append(call(op, sample))
        return [kept[0], shares_memory(kept[0], inputs), devices_of(kept[0], device)]

    observed = attempt(forward)
    yield without_values(observed) if op.name in UNDEFINED else observed
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if kept and leaves:
        yield attempt(lambda: gradients(sample.output_process_fn_grad(kept[0]), leaves))


def gradients(result: Any, leaves: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the leaves for results weighted by numbers from 0.5 to 1.5; their strides are free."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        return []
    weights = [
        torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.device, y.dtype) for y in outputs
    ]
    grads = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    return [grad if grad is None or grad.layout is not torch.strided else grad.contiguous() for grad in grads]


def in_channels_last(value: Any) -> Any:
    """Return `value`, a tensor of four or five dimensions with its channels innermost."""
    if isinstance(value, Tensor) and value.dim() in LAYOUTS:
        return value.detach().to(memory_format=LAYOUTS[value.dim()]).requires_grad_(value.requires_grad)
    return value


def call_with_out(op: OpInfo, sample: SampleInput, make_out: Callable[[Tensor], Tensor]) -> Any:
    """Call an operator with `out=` made like its result."""
    with torch.no_grad():
        result = call(op, sample)
        out = make_out(result) if isinstance(result, Tensor) else type(result)(tuple(make_out(each) for each in result))
        returned = op(sample.input, *sample.args, **sample.kwargs, out=out)
    same = [one is other for one, other in zip(tree_leaves(returned), tree_leaves(out), strict=True)]
    return [without_values(see(out)) if op.name in UNDEFINED else out, same]


def call_in_place(function: Callable[..., Any], sample: SampleInput, prepare: Callable[[Tensor], Tensor]) -> Any:
    """Call an in-place variant on a copy of a sample's input."""
    with torch.no_grad():
        target = prepare(sample.input)
        returned = function(target, *sample.args, **sample.kwargs)
    return [target, returned is target]


def noncontiguous(tensor: Tensor) -> Tensor:
    """Return a copy that is not contiguous."""
    return noncontiguous_like(tensor.detach())


def of_no_elements(tensor: Tensor) -> Tensor:
    """Return an empty tensor, which `out=` has to resize."""
    return tensor.new_empty(0)


def of_another_dtype(tensor: Tensor) -> Tensor:
    """Return a tensor of another dtype: of a wider one, which results are converted to, or of one that is refused."""
    other = {torch.float32: torch.float64, torch.int64: torch.int32}.get(tensor.dtype, torch.float32)
    return torch.empty_like(tensor, dtype=other)


def on_the_host(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, which the operator must refuse on another device."""
    return torch.empty_like(tensor, device="cpu")


def refuses(function: Callable[[], Any], kind: type[Exception] | tuple = Exception) -> bool:
    """Return whether the function raises."""
    try:
        function()
    except kind:
        return True
    except Exception:  # noqa: BLE001 - of another kind than the database says
        return False
    return False


instantiate_device_type_tests(TestOperators, globals(), only_for="npu")
