"""Models of vLLM that run its own Triton kernels on npu, without what in them asks for a maker's GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention

from npu_platform import compat

__all__ = ["NPUKimiGatedDeltaNetAttention", "NPUOlmoHybridGatedDeltaNetAttention"]


@KimiGatedDeltaNetAttention.register_oot
class NPUKimiGatedDeltaNetAttention(KimiGatedDeltaNetAttention):
    """Kimi's delta attention (KDA)."""

    def _forward(self, *args: Any, **kwargs: Any) -> None:
        _kimi_forward(self, *args, **kwargs)


@OlmoHybridGatedDeltaNetAttention.register_oot
class NPUOlmoHybridGatedDeltaNetAttention(OlmoHybridGatedDeltaNetAttention):
    """OLMo Hybrid's gated delta net."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's layer; arguments are those of vLLM's class."""
        _olmo_init(self, *args, **kwargs)


def gather_initial_states(states: torch.Tensor, indices: torch.Tensor, has_initial_state: torch.Tensor) -> torch.Tensor:
    """Return the states of a batch's requests, with zeros for those that begin.

    states: [blocks, ...]; indices: [requests], int32 or int64; has_initial_state: [requests], bool. vLLM's own asserts
    a CUDA or XPU tensor.
    """
    chosen = states.index_select(0, torch.where(has_initial_state, indices, 0))
    return chosen.masked_fill_(~has_initial_state.view(-1, *[1] * (states.ndim - 1)), 0)


def fused_convolution_loader(widths: Sequence[int], ranks: int, rank: int) -> Callable[..., None]:
    """Return the loader of a convolution's weights, of which a checkpoint has three parts of `widths` rows.

    vLLM 0.32 tells a loader by the tensor's attribute ``shard_id`` which part it is; its own loader for this layer
    takes an argument, which nobody gives, so that no device loads the model.
    """
    load = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader(widths, ranks, rank)

    def load_part(parameter: torch.Tensor, loaded: Any, part: int | None = None) -> None:
        load(parameter, loaded, loaded.shard_id if part is None else part)

    return load_part


_kimi_forward = compat.reading(KimiGatedDeltaNetAttention._forward, gather_initial_states=gather_initial_states)
_olmo_init = compat.reading(
    OlmoHybridGatedDeltaNetAttention.__init__, _make_fused_conv1d_weight_loader=fused_convolution_loader
)
