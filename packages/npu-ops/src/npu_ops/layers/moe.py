"""Gives vLLM's mixture-of-experts layers the kernels: the router's logits, routing, and the unquantized experts.

vLLM's runner is replaced for its router only; the experts' method is vLLM's CustomOp for out-of-tree platforms.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.experts_with_lora import kernel_with_lora
from npu_ops.layers.linear import NpuReplicatedLinear

ops = torch.ops.npu_ops

_ROUTERS = (FusedTopKRouter, FusedTopKBiasRouter, GroupedTopKRouter)
_ROUTERS_IN_TORCH = (CustomRoutingRouter, RoutingSimulatorRouter)
_SCORINGS = ("softmax", "sigmoid")


class NpuRouter(BaseRouter):
    """vLLM's softmax, sigmoid, grouped and bias-corrected top-k routers on one kernel."""

    def __init__(self, router: FusedTopKRouter | FusedTopKBiasRouter | GroupedTopKRouter) -> None:
        """Take over what `router` was built with; raises UnsupportedLayerError for what the kernel cannot do."""
        super().__init__(router.top_k, router.global_num_experts, router.eplb_state)
        self._method = router.routing_method_type
        self.renormalize = router.renormalize
        self.scoring_func = router.scoring_func
        self.routed_scaling_factor: float = getattr(router, "routed_scaling_factor", 1.0)
        self.e_score_correction_bias: Tensor | None = getattr(router, "e_score_correction_bias", None)
        self.num_expert_group: int = getattr(router, "num_expert_group", 0)
        self.topk_group: int = getattr(router, "topk_group", 0)
        if self.scoring_func not in _SCORINGS:
            _refuse(f"scores experts by {self.scoring_func!r}; the kernel knows {', '.join(_SCORINGS)}")
        if getattr(router, "_hash_indices_table", None) is not None or getattr(router, "bias_vl", None) is not None:
            _refuse("routes by token id, which has no kernel")
        if getattr(router, "num_fused_shared_experts", 0):
            _refuse("fuses its shared experts into the routed ones, which is for ROCm: unset fuse_shared_experts")

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """As the router that this one replaces."""
        return self._method

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """router_logits: [T, E]; returns weights float32 and expert ids int32, [T, top_k]."""
        bias = self.e_score_correction_bias
        return ops.select_experts(
            router_logits,
            self.top_k,
            self.scoring_func,
            self.renormalize,
            self.routed_scaling_factor,
            None if bias is None else bias.data,
            self._groups(router_logits.shape[-1]),
            self.topk_group,
        )

    def _groups(self, experts: int) -> int:
        """As vLLM's: groups that do not divide the experts, or hold one each, are none."""
        groups = self.num_expert_group
        return groups if groups and experts > groups and experts % groups == 0 else 0


@MoERunner.register_oot(name="MoERunner")
class NpuMoERunner(MoERunner):
    """MoERunner with the router on the kernel."""

    def __init__(self, *args: Any, router: FusedMoERouter, **kwargs: Any) -> None:
        """Arguments as MoERunner's; raises UnsupportedLayerError for a router that would need a CUDA kernel."""
        super().__init__(*args, router=_on_npu(router), **kwargs)


@GateLinear.register_oot(name="GateLinear")
class NpuGateLinear(NpuReplicatedLinear, GateLinear):
    """The router's logits, on the kernel of the linear layers."""


class Gate(NamedTuple):
    """The activation of an expert, as `npu_ops::fused_experts` takes it."""

    activation: str
    interleaved: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


@UnquantizedFusedMoEMethod.register_oot(name="UnquantizedFusedMoEMethod")
class NpuFusedMoEMethod(UnquantizedFusedMoEMethod):
    """UnquantizedFusedMoEMethod on the kernel; weights stay as the checkpoint stores them."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        """Raises UnsupportedLayerError for an activation without a kernel."""
        super().__init__(moe)
        self._gate = gate_of(moe)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Make the experts that vLLM's adapters of a mixture want, where adapters are on."""
        super().process_weights_after_loading(layer)
        if self.moe.is_lora_enabled and self.moe_kernel is None:
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            self.moe_kernel = kernel_with_lora(self.moe, self.moe_quant_config, self._gate)

    @property
    def is_monolithic(self) -> bool:
        """False: the router chooses the experts first."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """False: the kernel has no replicas of experts."""
        return False

    def npu_implementation(self) -> str:
        """Return the op."""
        return "npu_ops::fused_experts"

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x: [T, H]; topk_weights, topk_ids: [T, K]. Returns [T, H], this rank's part of it."""
        return ops.fused_experts(
            x,
            layer.w13_weight.data,
            layer.w2_weight.data,
            topk_weights,
            topk_ids,
            layer.w13_bias.data if self.moe.has_bias else None,
            layer.w2_bias.data if self.moe.has_bias else None,
            layer.expert_map,
            *self._gate,
            layer.apply_router_weight_on_input,
        )


def _on_npu(router: FusedMoERouter) -> FusedMoERouter:
    if type(router) in _ROUTERS:
        return NpuRouter(router)
    if not isinstance(router, (*_ROUTERS_IN_TORCH, NpuRouter)):
        _refuse(f"routes by vLLM's {type(router).__name__}, which has no kernel")
    return router


def gate_of(moe: FusedMoEConfig) -> Gate:
    """The activation with the constants that vLLM's apply_moe_activation gives it."""
    kind = moe.activation
    limit = math.inf if moe.swiglu_limit is None else moe.swiglu_limit
    if kind is MoEActivation.SILU:
        return Gate("silu", limit=limit)
    if kind is MoEActivation.SWIGLUOAI:
        return Gate("silu", interleaved=True, alpha=1.702, beta=1.0, limit=7.0)
    if kind is MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        alpha = 1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha
        return Gate("silu", alpha=alpha, beta=moe.swiglu_beta or 0.0, limit=limit)
    name = kind.value.removesuffix("_no_mul")
    if name not in ("silu", "gelu", "gelu_tanh", "relu2") or kind is MoEActivation.RELU2:
        _refuse(f"has the activation {kind.value!r}, which has no kernel")
    return Gate(name)


def _refuse(reason: str) -> None:
    msg = f"this model's mixture of experts {reason}: serve another model, or its dense variant."
    raise UnsupportedLayerError(msg)
