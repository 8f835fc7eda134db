"""Derivatives of PyTorch's operators on npu against finite differences: backward, forward mode and second order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase, gradcheck, gradgradcheck
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.support.operators import samples
from tests.support.parity import as_on_cpu

SAMPLES = 1
DIFFERENTIABLE = [op for op in op_db if op.supports_autograd]


class TestGradients(TestCase):
    @ops(DIFFERENTIABLE, allowed_dtypes=(torch.float64,))
    @as_on_cpu
    def test_first_order(self, device: str, dtype: torch.dtype, op: OpInfo) -> Iterator[Any]:
        for sample in differentiable_samples(op, device, dtype):
            yield gradcheck(
                *function_and_leaves(op, sample),
                check_forward_ad=op.supports_forward_ad,
                check_batched_grad=False,
                check_undefined_grad=False,
                check_batched_forward_grad=False,
                nondet_tol=op.gradcheck_nondet_tol,
                fast_mode=True,
            )

    @ops([op for op in DIFFERENTIABLE if op.supports_gradgrad], allowed_dtypes=(torch.float64,))
    @as_on_cpu
    def test_second_order(self, device: str, dtype: torch.dtype, op: OpInfo) -> Iterator[Any]:
        for sample in differentiable_samples(op, device, dtype):
            yield gradgradcheck(
                *function_and_leaves(op, sample),
                gen_non_contig_grad_outputs=True,
                check_batched_grad=False,
                check_undefined_grad=False,
                nondet_tol=op.gradcheck_nondet_tol,
                fast_mode=True,
            )


def differentiable_samples(op: OpInfo, device: str, dtype: torch.dtype) -> Iterator[SampleInput]:
    """Return the first samples that have elements to differentiate for."""
    with_elements = (
        sample
        for sample in samples(op, device, dtype, differentiable=True, most=20)
        if any(leaf.numel() for leaf in leaves_of(sample))
    )
    return itertools.islice(with_elements, SAMPLES)


def leaves_of(sample: SampleInput) -> list[Tensor]:
    """Return the tensors of a sample that take gradients."""
    everything = tree_leaves([sample.input, sample.args, sample.kwargs])
    return [leaf for leaf in everything if isinstance(leaf, Tensor) and leaf.requires_grad]


def function_and_leaves(op: OpInfo, sample: SampleInput) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Return an operator on a sample as a function of the tensors that take gradients, and these."""
    flat, spec = tree_flatten([sample.input, list(sample.args), dict(sample.kwargs)])
    places = [index for index, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]

    @functools.wraps(op)
    def function(*leaves: Tensor) -> Any:
        values = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            values[place] = leaf
        first, args, kwargs = tree_unflatten(values, spec)
        result = sample.output_process_fn_grad(op.gradcheck_wrapper(op, first, *args, **kwargs))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return tuple(leaf for leaf in tensors if leaf.is_floating_point() or leaf.is_complex())

    return function, tuple(flat[place] for place in places)


instantiate_device_type_tests(TestGradients, globals(), only_for="npu")
