"""PyTorch's operator database on npu: each operator's samples give what the CPU gives.

A first part of the conformance kit: forward, float32 and int64, a few samples of each operator. What is left out is
in SKIPPED, with its reason.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

SAMPLES = 3

SKIPPED = {
    "to_sparse": "npu tensors are dense",
    "sparse.mm": "npu tensors are dense",
    "sparse.sampled_addmm": "npu tensors are dense",
    "empty": "its result is not defined",
    "empty_like": "its result is not defined",
    "empty_strided": "its result is not defined",
    "empty_permuted": "its result is not defined",
    "new_empty": "its result is not defined",
    "new_empty_strided": "its result is not defined",
    "as_strided_partial_views": "its samples are views of storages that a move to another device does not copy",
    "tensor_split": "one sample's sections must lie on the CPU, on every device",
    "jiterator_unary": "CUDA only",
    "jiterator_binary": "CUDA only",
    "jiterator_4inputs_with_extra_args": "CUDA only",
    "jiterator_binary_return_by_ref": "CUDA only",
    "jiterator_2inputs_2outputs": "CUDA only",
    "bernoulli": "random",
    "cauchy": "random",
    "exponential": "random",
    "geometric": "random",
    "log_normal": "random",
    "multinomial": "random",
    "normal": "random",
    "rand_like": "random",
    "randint": "random",
    "randint_like": "random",
    "randn": "random",
    "randn_like": "random",
    "uniform": "random",
    "nn.functional.alpha_dropout": "random",
    "nn.functional.dropout": "random",
    "nn.functional.dropout2d": "random",
    "nn.functional.dropout3d": "random",
    "nn.functional.feature_alpha_dropout": "random",
    "nn.functional.fractional_max_pool2d": "random",
    "nn.functional.fractional_max_pool3d": "random",
    "nn.functional.rrelu": "random",
    "nn.functional.multi_head_attention_forward": "random: its samples use dropout",
    "nn.functional.scaled_dot_product_attention": "random: its samples use dropout",
    "pca_lowrank": "random",
    "svd_lowrank": "random",
    "svd": "unique up to signs only",
    "linalg.svd": "unique up to signs only",
    "linalg.eig": "unique up to scale only",
    "linalg.eigh": "unique up to signs only",
}

# One element normalised: minus its mean times 1 / sqrt(eps), where rounding decides the fourth digit.
LOOSE = {"nn.functional.layer_norm": {"rtol": 1e-3, "atol": 1e-3}}


def operators() -> list[OpInfo]:
    """Return the database's operators that take float32 or int64 and are not left out."""
    return [op for op in op_db if not {op.name, op.formatted_name} & SKIPPED.keys() and dtype_of(op) is not None]


def dtype_of(op: OpInfo) -> torch.dtype | None:
    """Return the dtype to sample `op` with."""
    return next((dtype for dtype in (torch.float32, torch.int64) if dtype in op.dtypes), None)


def on_npu(value: Any) -> Any:
    """Return `value` with its tensors, and a device argument, moved to npu."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("npu")
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("npu")
    if isinstance(value, dict):
        return {key: on_npu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_npu(item) for item in value)
    return value


@pytest.mark.parametrize("op", operators(), ids=lambda op: op.formatted_name)
def test_equals_cpu(op: OpInfo) -> None:
    samples: list[SampleInput] = list(itertools.islice(op.sample_inputs("cpu", dtype_of(op)), SAMPLES))
    for sample in samples:
        arguments = (sample.input, *sample.args)
        moved, moved_keywords = on_npu(arguments), on_npu(sample.kwargs)
        with torch.no_grad():
            try:
                expected = op(*arguments, **sample.kwargs)
            except (RuntimeError, NotImplementedError):
                continue  # the CPU has no answer to compare with
            actual = op(*moved, **moved_keywords)
        torch.testing.assert_close(
            to_host(actual), expected, equal_nan=True, check_stride=False, **LOOSE.get(op.name, {})
        )


def to_host(value: Any) -> Any:
    """Return `value` with its tensors on the CPU; a tensor that is not on npu by then is an error of its own."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, (list, tuple)):
        items = [to_host(item) for item in value]
        return type(value)(items) if type(value) in (list, tuple) else tuple(items)
    return value
