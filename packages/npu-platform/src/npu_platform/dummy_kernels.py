"""Owns which kernels compute nothing in a run that is made for its allocations alone, or for the launches of a graph.

At a start they are those of npu-ops that give real numbers or write caches: nobody looks at what they would give, and
vLLM itself expects any values. Those whose integers others take as places, and all ops of PyTorch but linear, run.
While replicas serve they are the linear layers: one without requests computes with its experts for the others' tokens.
"""

from __future__ import annotations

import contextlib

import torch

__all__ = ["LINEAR", "RUN", "SKIPPED", "launches_alone", "of_dummy_run"]

LINEAR = ("npu_ops::linear", "aten::linear")

_LAYERS = """
    linear linear_add_ linear_silu_and_mul weight_only_linear fp8_linear int8_linear int8_linear_dynamic
    dynamic_int8_quant static_int8_quant lora_shrink lora_expand embedding
    fused_experts weight_only_experts fp8_experts int8_experts
"""
_CACHES = """
    paged_attention paged_attention_quantized varlen_attention reshape_and_cache reshape_and_cache_quantized
    qk_norm_rotary_and_cache rotary_embedding gated_delta_rule selective_scan causal_conv1d
"""
_NORMS_AND_ACTIVATIONS = """
    layer_norm rms_norm rms_norm_static_quant rms_norm_dynamic_quant fused_add_rms_norm gated_rms_norm
    gemma_rms_norm fused_add_gemma_rms_norm silu_and_mul silu_and_mul_with_clamp mul_and_silu gelu gelu_and_mul
    gelu_and_mul_sparse quick_gelu relu2 xielu fatrelu_and_mul situ_and_mul swigluoai_and_mul swiglustep_and_mul
"""
SKIPPED = frozenset(f"{_LAYERS}{_CACHES}{_NORMS_AND_ACTIVATIONS}".split())
"""Of the ops of npu-ops."""
_INTEGERS = "select_experts argmax random_sample seeded_sample recovered_tokens top_logprobs"
_OUTSIDE = "top_k_top_p min_p apply_penalties counted_penalties copy_pages"  # of what a graph has
RUN = frozenset(f"{_INTEGERS} {_OUTSIDE}".split())
"""The others."""


def launches_alone(*, recorded: bool) -> contextlib.AbstractContextManager[None]:
    """Return a block in which a batch has its allocations and launches; `recorded`: a graph is to have them all.

    A graph has the launch of a kernel that is skipped, but not that of an op of PyTorch.
    """
    of_torch = () if recorded else LINEAR[1:]
    return torch.npu.skip_kernels(*(f"npu_ops::{name}" for name in SKIPPED), *of_torch)


def of_dummy_run(
    *, is_graph_capturing: bool = False, is_profile: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Return a block for a batch without requests, by the options that vLLM's ``_dummy_run`` gets."""
    if is_graph_capturing or is_profile:
        return launches_alone(recorded=is_graph_capturing)
    return torch.npu.skip_kernels(*LINEAR)
