"""LoRA on npu: vLLM's wrapper of the two products, on npu-ops' kernels when they are there, in plain torch otherwise.

What changes from step to step is read from the device's index tensors at their fixed addresses, so that a captured
graph serves every batch of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
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

    def add_lora_w13(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        *_: Any,
        add_inputs: bool = True,
        **__: Any,
    ) -> tuple[None, Tensor, None, Tensor]:
        """Add x A_i^T B_i^T of each token's adapter and experts to y's next columns, those of the first layer.

        y: [T, K, N]; x: [T, H]; lora_a_stacked: each [adapters, E, R, H]; lora_b_stacked: each [adapters, E, columns,
        R]; topk_ids: [T, K]; expert_map: int32 [global experts], -1: not here. Returns what :meth:`add_lora_w2` wants:
        second the expert of each of the T K rows, last the adapter; -1: none.
        """
        expert = (topk_ids if expert_map is None else expert_map[topk_ids.long()]).long()
        adapter = self._token_lora_indices[: x.shape[0], None].expand_as(expert)
        here = (adapter >= 0) & (expert >= 0)
        routing = None, torch.where(here, expert, -1).flatten(), None, torch.where(here, adapter, -1).flatten()
        rows = x[:, None].expand(-1, expert.shape[1], -1).reshape(expert.numel(), -1)
        _add_experts(
            y.view(expert.numel(), -1), rows, lora_a_stacked, lora_b_stacked, routing[1], routing[3], add_inputs
        )
        return routing

    def add_lora_w2(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor,
        sorted_token_ids_lora: None,
        expert_ids_lora: Tensor,
        num_tokens_post_padded_lora: None,
        token_lora_mapping: Tensor,
        *_: Any,
        add_inputs: bool = True,
        **__: Any,
    ) -> None:
        """Add weight * (x A^T) B^T to y, the second layer. y: [T, K, H]; x: [T K, I]; topk_weights: [T, K]."""
        rows, weights = y.view(x.shape[0], -1), topk_weights.reshape(-1, 1).float()
        _add_experts(
            rows, x, lora_a_stacked, lora_b_stacked, expert_ids_lora, token_lora_mapping, add_inputs, weights=weights
        )


def _add_experts(
    y: Tensor,
    x: Tensor,
    weights_a: Sequence[Tensor],
    weights_b: Sequence[Tensor],
    expert: Tensor,
    adapter: Tensor,
    add: bool,
    weights: Tensor | None = None,
) -> None:
    """Add x A_i^T B_i^T to y [rows, N], A_i and B_i by each row's adapter and expert; `weights`: float32 [rows, 1].

    With --fully-sharded-loras each rank has some rows of the first layer's A, whose products are put side by side, and
    some rows of the second's B, for its own columns of y: there the ranks' products, each of a part of x, are summed.
    """
    products = x.new_empty(len(weights_a), x.shape[0], weights_a[0].shape[-2], dtype=torch.float32)
    stacks, index = _by_pair(weights_a, expert, adapter)
    _shrink(products, x, stacks, index, 1.0)
    if weights is not None:
        products *= weights
    stacks, index = _by_pair(weights_b, expert, adapter)
    columns, offset = [stack.shape[-2] for stack in stacks], 0
    if products.shape[-1] < stacks[0].shape[-1]:
        products = tensor_model_parallel_all_gather(products)
    if sum(columns) < y.shape[-1]:
        products = tensor_model_parallel_all_reduce(products)
        offset = get_tensor_model_parallel_rank() * sum(columns)
    _expand(y, products, stacks, index, columns, offset, add)


def _by_pair(stacks: Sequence[Tensor], expert: Tensor, adapter: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return stacks [adapters, E, N, K] as [adapters * E, 1, N, K], and each row's place there.

    Where all experts share a matrix (their stride is 0), it stays [adapters, 1, N, K].
    """
    experts = stacks[0].shape[1]
    if experts > 1 and stacks[0].stride(1) == 0:
        return [stack[:, :1] for stack in stacks], adapter
    pairs = torch.where(adapter >= 0, adapter * experts + expert, -1)
    return [stack.flatten(0, 1)[:, None] for stack in stacks], pairs


def _shrink(
    y: tuple[Tensor, ...] | Tensor, x: Tensor, weights: Sequence[Tensor], indices: Tensor, scale: float
) -> None:
    x = x.to(weights[0].dtype)  # that of --lora-dtype
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
    if weights[0].dtype != y.dtype:
        part = y[:, offset : offset + sum(columns)]
        wide = part.to(weights[0].dtype)
        _expand(wide, x, weights, indices, columns, 0, add)
        part.copy_(torch.where((indices[: y.shape[0]] >= 0)[:, None], wide.to(y.dtype), part))
        return
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
