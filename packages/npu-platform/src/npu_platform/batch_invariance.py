"""Torch's matrix products in batch-invariant mode: a row's result has the same bits whatever rows share the product.

Layers call npu-ops themselves; what is left are products that models and vLLM write with torch. They are registered for
the device as ``vllm.model_executor.determinism.batch_invariant`` registers its Triton kernels for others.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def register_products() -> torch.library.Library:
    """Make the products of npu tensors batch-invariant for the rest of the process.

    The library that is returned, and kept, holds the registrations.
    """
    library = torch.library.Library("aten", "IMPL")
    products: dict[str, Callable[..., torch.Tensor]] = {"mm": mm, "addmm": addmm, "bmm": bmm, "baddbmm": baddbmm}
    for name, product in products.items():
        library.impl(name, product, "PrivateUse1")
        library.impl(f"{name}.out", _into_out(product), "PrivateUse1")
    library.impl("linear", linear, "PrivateUse1")
    return library


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., k] times the rows of weight [n, k], plus bias [n]."""
    if x.dtype not in _DTYPES:
        moved = (x.cpu(), weight.cpu(), None if bias is None else bias.cpu())
        return torch.nn.functional.linear(*moved).to(x.device)
    rows = x.reshape(-1, x.shape[-1])
    return torch.ops.npu_ops.linear(_rows(rows), _rows(weight), bias).view(*x.shape[:-1], weight.shape[0])


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [m, k] times b [k, n] as [m, n]."""
    return linear(a, b.t())


def addmm(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """Return beta * added + alpha * (a [m, k] times b [k, n])."""
    return _add(added, mm(a, b), beta, alpha)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the products of a [batch, m, k] and b [batch, k, n] as [batch, m, n]."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for one, rows, columns in zip(out, a, b, strict=True):
        one.copy_(mm(rows, columns))
    return out


def baddbmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Return beta * added + alpha * (the products of a [batch, m, k] and b [batch, k, n])."""
    return _add(added, bmm(a, b), beta, alpha)


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _add(added: torch.Tensor, product: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else torch.add(product, added, alpha=beta)  # which, then, may hold NaN


def _into_out(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def into(*args: torch.Tensor, out: torch.Tensor, **factors: float) -> torch.Tensor:
        result = product(*args, **factors)
        return out.resize_(result.shape).copy_(result)

    return into
