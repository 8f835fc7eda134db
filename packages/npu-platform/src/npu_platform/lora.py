"""LoRA on npu: vLLM's wrapper of the two products, on npu-ops' kernels when they are there, in plain torch otherwise.

What changes from step to step is read from the device's index tensors at their fixed addresses, so that a captured
graph serves every batch of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping


class NPUPunicaWrapper(PunicaWrapperCPU):
    """The LoRA products of every layer; tokens without an adapter are left as they are."""

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **_: Any,
    ) -> None:
        """Write each token's adapter to the device; prefill and decode need nothing else, and differ in nothing."""
        self.is_prefill = mapping.is_prefill
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)

    def add_shrink(
        self,
        y: tuple[Tensor, ...] | Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        scale: float,
        **_: Any,
    ) -> None:
        """y[i] = scale * x A_i^T. y: float32 [S, T, R], or S of [T, R]; x: [..., H]."""
        _shrink(y, x.reshape(-1, x.shape[-1]), lora_a_stacked, self._token_lora_indices, scale)

    def add_expand(
        self,
        y: Tensor,
        x: tuple[Tensor, ...] | Tensor,
        lora_b_stacked: tuple[Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **_: Any,
    ) -> None:
        """Add x[i] B_i^T to y's next output_slices[i] columns. y: [..., N]; x: float32 [S, T, R], or S of [T, R]."""
        flat = y.view(-1, y.shape[-1])
        _expand(flat, x, lora_b_stacked, self._token_lora_indices, output_slices, offset_start, add_inputs)

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **_: Any
    ) -> None:
        """Add x B^T to y. y: [T, H]; x: [T, R]."""
        _expand(y, x.float()[None], (lora_b_stacked,), self._token_lora_indices, (y.shape[-1],), 0, add_inputs)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **_: Any,
    ) -> None:
        """Add scale * (x A_i^T) B_i^T to y's next output_slices[i] columns. y: [..., N]; x: [..., H]."""
        rank, tokens = lora_b_stacked[0].shape[-1], x.numel() // x.shape[-1]
        products = x.new_empty(len(output_slices), tokens, rank, dtype=torch.float32) if buffer is None else buffer
        self.add_shrink(products, x, lora_a_stacked, scale)
        self.add_expand(y, products, lora_b_stacked, output_slices)

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        *,
        buffer: Tensor | None = None,
        **_: Any,
    ) -> None:
        """Add scale * (x A^T) B^T to the logits y, by each sampled token's adapter. y: [T, V]; x: [T, H]."""
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        products = x.new_empty(1, x.shape[0], lora_b_stacked.shape[-1], dtype=torch.float32)
        _shrink(products, x, (lora_a_stacked,), self._sampler_indices, scale)
        _expand(y, products, (lora_b_stacked,), self._sampler_indices, (y.shape[-1],), 0, add=True)


def _shrink(
    y: tuple[Tensor, ...] | Tensor, x: Tensor, weights: Sequence[Tensor], indices: Tensor, scale: float
) -> None:
    if not hasattr(torch.ops.npu_ops, "lora_shrink"):
        for product, stack in zip(y, weights, strict=True):
            product.zero_()
            for adapter, here in _adapters(stack, indices, x):
                product.add_(torch.where(here, scale * (x.float() @ adapter.float().t()), 0))
        return
    for product, chosen in _slices(y, weights):
        torch.ops.npu_ops.lora_shrink(product, x, chosen, indices, scale)


def _expand(
    y: Tensor,
    x: tuple[Tensor, ...] | Tensor,
    weights: Sequence[Tensor],
    indices: Tensor,
    columns: Sequence[int],
    offset: int,
    add: bool,
) -> None:
    for products, chosen in _slices(x, weights):
        counts = list(columns[: len(chosen)])
        columns = columns[len(chosen) :]
        if hasattr(torch.ops.npu_ops, "lora_expand"):
            torch.ops.npu_ops.lora_expand(y, products, chosen, indices, counts, offset, add)
            offset += sum(counts)
            continue
        for product, stack, count in zip(products, chosen, counts, strict=True):
            for adapter, here in _adapters(stack[..., :count, :], indices, y):
                part = y[:, offset : offset + adapter.shape[0]]
                result = product @ adapter.float().t() + (part.float() if add else 0)
                part.copy_(torch.where(here, result.to(y.dtype), part))
            offset += count


def _slices(products: tuple[Tensor, ...] | Tensor, weights: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """All slices at once where they lie in one tensor, one by one where they do not."""
    if isinstance(products, Tensor):
        return [(products, list(weights))]
    return [(product[None], [stack]) for product, stack in zip(products, weights, strict=True)]


def _adapters(stack: Tensor, indices: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each adapter of a stack [adapters, 1, N, K] as [N, K], and which rows are its own, [T, 1]."""
    index = indices[: rows.shape[0], None]
    return [(adapter, index == number) for number, adapter in enumerate(stack.flatten(0, -3))]
