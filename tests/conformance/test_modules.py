"""PyTorch's module database on npu: results, gradients, state and errors are those of the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_modules import ModuleErrorEnum, ModuleInfo, ModuleInput, module_db, modules
from torch.testing._internal.common_utils import TestCase, noncontiguous_like
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.parity import as_on_cpu, attempt

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SAMPLES = 6


class TestModules(TestCase):
    @modules(module_db, allowed_dtypes=DTYPES)
    @as_on_cpu
    def test_forward_and_backward(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> Iterator[Any]:
        for sample in inputs_of(module_info, device, dtype, training):
            yield attempt(lambda sample=sample: trained(module_info, sample, device, dtype, training))

    @modules(module_db, allowed_dtypes=(torch.float32,))
    @as_on_cpu
    def test_noncontiguous_inputs(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> Iterator[Any]:
        for sample in inputs_of(module_info, device, dtype, training):
            forward = sample.forward_input
            forward.args, forward.kwargs = tree_map(noncontiguous, (forward.args, forward.kwargs))
            yield attempt(lambda sample=sample: trained(module_info, sample, device, dtype, training))

    @modules(module_db, allowed_dtypes=(torch.float32,))
    @as_on_cpu
    def test_moves_copies_and_state(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> Iterator[Any]:
        for sample in inputs_of(module_info, device, dtype, training)[:2]:
            yield attempt(lambda sample=sample: moved_and_saved(module_info, sample, device, dtype))

    @modules([info for info in module_db if info.module_error_inputs_func is not None], allowed_dtypes=(torch.float32,))
    @as_on_cpu
    def test_error_inputs(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> Iterator[Any]:
        # Those of the CPU, on either device: for other devices the database leaves some out.
        errors = module_info.module_error_inputs_func(
            module_info, device="cpu", dtype=dtype, requires_grad=False, training=training
        )
        for error in errors:
            sample = error.module_error_input
            arguments, forward = sample.constructor_input, sample.forward_input
            with pytest.raises(error.error_type, match=error.error_regex):
                module = module_info.module_cls(*arguments.args, **arguments.kwargs).to(device)
                if error.error_on == ModuleErrorEnum.FORWARD_ERROR:
                    module(*on(device, forward.args), **on(device, forward.kwargs))
            yield True


def inputs_of(module_info: ModuleInfo, device: str, dtype: torch.dtype, training: bool) -> list[ModuleInput]:
    """Return the module's first samples on a device."""
    samples = module_info.module_inputs_func(
        module_info, device=device, dtype=dtype, requires_grad=True, training=training
    )
    return [sample for sample in samples if sample.forward_input is not None][:SAMPLES]


def build(module_info: ModuleInfo, sample: ModuleInput, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """Return the module with the parameters that its construction on the CPU draws."""
    arguments = sample.constructor_input
    return module_info.module_cls(*arguments.args, **arguments.kwargs).to(device).to(dtype)


def trained(module_info: ModuleInfo, sample: ModuleInput, device: str, dtype: torch.dtype, training: bool) -> list[Any]:
    """Return a module's results, the gradients of its inputs and parameters, and its buffers afterwards."""
    module = build(module_info, sample, device, dtype).train(training)
    forward = sample.forward_input
    torch.manual_seed(0)
    result = module(*forward.args, **forward.kwargs)
    leaves = [*tensors(forward.args), *tensors(forward.kwargs), *module.parameters()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = [leaf for leaf in tensors(result) if leaf.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs], allow_unused=True)
    return [result, list(grads), dict(module.named_buffers())]


def moved_and_saved(module_info: ModuleInfo, sample: ModuleInput, device: str, dtype: torch.dtype) -> list[Any]:
    """Return a module's results after each way that it can travel, and its state read back on the CPU."""
    module = build(module_info, sample, device, dtype).eval()
    forward = sample.forward_input
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location="cpu")
    there_and_back = copy.deepcopy(module).cpu().to(device)
    results = [each(*forward.args, **forward.kwargs) for each in (module, copy.deepcopy(module), there_and_back)]
    return [results, state, [parameter.device.type == torch.device(device).type for parameter in module.parameters()]]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def on(device: str, value: Any) -> Any:
    """Return a value with its tensors on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def noncontiguous(leaf: Any) -> Any:
    """Return a tensor that is not contiguous."""
    if not isinstance(leaf, Tensor):
        return leaf
    return noncontiguous_like(leaf.detach()).requires_grad_(leaf.requires_grad)


instantiate_device_type_tests(TestModules, globals(), only_for="npu")
