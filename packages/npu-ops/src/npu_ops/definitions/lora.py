"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), another one for each token (Punica, arXiv 2310.18547)."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define


@define("lora_shrink(Tensor(a!) y, Tensor x, Tensor[] weights, Tensor indices, float scale) -> ()")
def lora_shrink(y: Tensor, x: Tensor, weights: list[Tensor], indices: Tensor, scale: float) -> None:
    """y[i] = scale * x A_i^T by each token's adapter; zero for a token without one.

    y: float32 [S, T, R]; x: [T, H]; weights: S stacks [adapters, 1, R, H] of x's dtype; indices: int64 [at least T],
    -1: no adapter.
    """
    index = indices[: x.shape[0]]
    wide = torch.promote_types(x.dtype, torch.float32)
    for out, stack in zip(y, weights, strict=True):
        out.zero_()
        for number, adapter in enumerate(stack.flatten(0, -3)):
            product = scale * (x.to(wide) @ adapter.to(wide).t())
            out.add_(torch.where((index == number)[:, None], product, 0))


@define(
    "lora_expand(Tensor(a!) y, Tensor x, Tensor[] weights, Tensor indices, int[] columns, int offset, bool add) -> ()"
)
def lora_expand(
    y: Tensor, x: Tensor, weights: list[Tensor], indices: Tensor, columns: list[int], offset: int, add: bool
) -> None:
    """Put x[i] B_i^T by each token's adapter into y's next columns[i] columns from offset on; add it, or replace.

    y: [T, N]; x: float32 [S, T, R]; weights: S stacks [adapters, 1, at most columns[i], R] of y's dtype; indices: int64
    [at least T], -1: no adapter, y stays.
    """
    index = indices[: y.shape[0]]
    wide = torch.promote_types(y.dtype, torch.float32)
    for product, stack, count in zip(x, weights, columns, strict=True):
        for number, adapter in enumerate(stack.flatten(0, -3)[:, :count]):
            part = y[:, offset : offset + adapter.shape[0]]
            result = product.to(wide) @ adapter.to(wide).t() + (part.to(wide) if add else 0)
            part.copy_(torch.where((index == number)[:, None], result.to(y.dtype), part))
        offset += count
