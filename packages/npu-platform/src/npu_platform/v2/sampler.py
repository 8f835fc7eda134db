"""NPUSamplerV2: the V2 runner's sampler, with npu-ops' kernels for greedy choices and for top-k and top-p."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.sample.sampler import Sampler

from npu_platform import compat
from npu_platform.config import NPUConfig

__all__ = ["NPUSamplerV2", "make_sampler"]


def make_sampler(**arguments: Any) -> Sampler:
    """Return the sampler that the settings ask for; arguments are those of vLLM's."""
    config = NPUConfig.from_additional_config(arguments["vllm_config"].additional_config)
    native = config.sampler == "npu_ops" and hasattr(torch.ops.npu_ops, "top_k_top_p")
    return (NPUSamplerV2 if native else Sampler)(**arguments)


class NPUSamplerV2(Sampler):
    """vLLM's V2 sampler; penalties, biases, grammars and the noise of a random choice stay its Triton kernels."""

    def apply_sampling_params(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        *rest: Any,
        skip_top_k_top_p: bool = False,
    ) -> torch.Tensor:
        """Return logits [tokens, vocabulary] in float32 as the requests want them; those given, if none wants any."""
        processed = super().apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *rest, skip_top_k_top_p=True
        )
        if skip_top_k_top_p or processed is logits:
            return processed
        rows, vocabulary = (expanded_idx_mapping, idx_mapping_np), logits.shape[-1]
        return _filtered(processed, *compat.top_k_top_p(self.sampling_states, *rows, vocabulary))

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        greedy = not self.sampling_states.temperature.np[idx_mapping_np].any()
        wanted = not greedy or self.logprobs_mode in PROCESSED_LOGPROBS_MODES
        if wanted and not (top_k is None and top_p is None):
            if not self.needs_logits_processing[idx_mapping_np].any():  # they are the model's own
                processed_logits = processed_logits.clone()
            processed_logits = _filtered(processed_logits, top_k, top_p)
        if greedy:
            return torch.ops.npu_ops.argmax(processed_logits).view(-1), processed_logits
        return super()._sample_random(processed_logits, expanded_idx_mapping, idx_mapping_np, pos, None, None, *rest)


def _filtered(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Return `logits` without what lies outside the k highest and the nucleus p; in place where they are float32."""
    if k is None and p is None:
        return logits
    logits = logits.float()
    torch.ops.npu_ops.top_k_top_p(logits, k, p)
    return logits
