"""Owns mixtures of experts with low-rank adapters: vLLM's modular experts, on the kernels of LoRA.

Each pair of a token and one of its experts is a row. An expert's weights are chosen for a row as an adapter's are for a
token, so that the two products are the kernels of LoRA, and between them there is room for the adapters' own products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from npu_ops.definitions.moe import activated

__all__ = ["NpuExpertsWithLora", "kernel_with_lora"]

ops = torch.ops.npu_ops


def kernel_with_lora(
    moe: FusedMoEConfig, quant_config: FusedMoEQuantConfig, gate: tuple[Any, ...]
) -> mk.FusedMoEKernel:
    """Return vLLM's frame around :class:`NpuExpertsWithLora`; `gate` is the activation, as `fused_experts` takes it."""
    return mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), NpuExpertsWithLora(moe, quant_config, gate))


class NpuExpertsWithLora(LoRAExpertsMixin, mk.FusedMoEExpertsModular):
    """Unquantised experts, and what the adapters of their tokens add to each of the two layers."""

    def __init__(self, moe: FusedMoEConfig, quant_config: FusedMoEQuantConfig, gate: tuple[Any, ...]) -> None:
        """Take the activation beside vLLM's own arguments."""
        super().__init__(moe, quant_config)
        self._gate = gate

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Say that tokens come one after the other, not by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Say True."""
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True  # the layer's method has refused those without a formula

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return moe_parallel_config.dp_size == 1

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:  # noqa: N803
        """Ask for the output [M, K] alone."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Say that nothing is left to do."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write output [T, H]. hidden_states: [T, H]; w1: [E, 2 I, H]; w2: [E, H, I]; topk_*: [T, K]."""
        tokens, chosen = topk_ids.shape
        expert = (topk_ids if expert_map is None else expert_map[topk_ids.long()]).flatten().long()
        sizes = {"w1": w1, "w2": w2, "num_tokens": tokens, "top_k_num": chosen}
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights

        rows = hidden_states[:, None].expand(-1, chosen, -1).reshape(tokens * chosen, -1)
        inner = _products(rows, w1, expert, self.w1_bias).to(hidden_states.dtype)
        routing: Any = (None, None, None, None)
        if self._lora_context is not None:
            routing = self.apply_w13_lora(
                self._lora_context,
                y=inner.view(tokens, chosen, -1),
                x=hidden_states,
                topk_ids=topk_ids,
                topk_weights=topk_weights,
                expert_map=expert_map,
                **sizes,
            )
        inner = activated(inner.float(), w2.shape[-1], *self._gate).to(hidden_states.dtype)

        outer = _products(inner, w2, expert, self.w2_bias) * weights.reshape(-1, 1)
        outer = outer.to(hidden_states.dtype)
        if self._lora_context is not None:
            names = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping")
            self.apply_w2_lora(
                self._lora_context,
                y=outer.view(tokens, chosen, -1),
                x=inner,
                topk_weights=weights,
                **dict(zip(names, routing, strict=True)),
                **sizes,
            )
        output.copy_(outer.view(tokens, chosen, -1).float().sum(1))


def _products(rows: Tensor, weights: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
    """Return float32 [rows, N]: each row's product with its expert's weights, [E, N, K]; zero for one without."""
    result = rows.new_empty(1, rows.shape[0], weights.shape[1], dtype=torch.float32)
    ops.lora_shrink(result, rows, [weights.data[:, None]], index, 1.0)
    if bias is not None:
        result += torch.where((index >= 0)[:, None], bias[index.clamp(min=0)].float(), 0)
    return result[0]
