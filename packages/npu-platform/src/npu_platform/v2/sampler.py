"""NPUSamplerV2: the V2 runner's sampler, with npu-ops' kernels for penalties, for top-k and top-p, and for the choice.

A random choice is by the seed and the position that vLLM's is by, but without noise for each token of the vocabulary:
another token than vLLM's, of the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from npu_platform import compat
from npu_platform.config import NPUConfig

__all__ = ["NPUSamplerV2", "make_sampler"]


def make_sampler(**arguments: Any) -> Sampler:
    """Return the sampler that the settings ask for; arguments are those of vLLM's."""
    config = NPUConfig.from_additional_config(arguments["vllm_config"].additional_config)
    native = config.sampler == "npu_ops" and hasattr(torch.ops.npu_ops, "top_k_top_p")
    return (NPUSamplerV2 if native else Sampler)(**arguments)


class NPUPenaltiesState(PenaltiesState):
    """vLLM's penalties, whose counts stay its own; only logits of tokens that occurred are touched."""

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Penalise logits [tokens, vocabulary], float32, in place, and return them."""
        if self.use_penalty[ctx.idx_mapping_np].any():
            penalties = (self.presence_penalty.gpu, self.frequency_penalty.gpu, self.repetition_penalty.gpu)
            torch.ops.npu_ops.counted_penalties(
                logits,
                ctx.expanded_idx_mapping.long(),
                ctx.input_ids.int(),
                ctx.expanded_local_pos,
                *penalties,
                self.prompt_bin_mask,
                self.output_bin_counts,
            )
        return logits


class NPUSamplerV2(Sampler):
    """vLLM's V2 sampler; biases, bad words, grammars and min-p stay its Triton kernels."""

    _make = compat.reading(Sampler.__init__, PenaltiesState=NPUPenaltiesState)

    def __init__(self, custom_logits_processors: Sequence[LogitsProcessor] = (), **arguments: Any) -> None:
        """Build vLLM's sampler; arguments are those of vLLM's."""
        self._make(custom_logits_processors=custom_logits_processors, **arguments)
        self._custom = custom_logits_processors
        self._added = True

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Note what the request in slot `req_idx` wants."""
        super().add_request(req_idx, sampling_params)
        self._added = True

    def apply_staged_writes(self) -> None:
        """Bring to the device what requests want; where none was added since, that is what processors of users do.

        vLLM's own states change with a request only, but copy their numbers in each step: a tenth of a millisecond.
        """
        if self._added:
            super().apply_staged_writes()
            self._added = False
            return
        for processor in self._custom:
            processor.apply_staged_writes()

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
        if self.use_fp64_gumbel:  # somebody wants vLLM's own noise, more exactly than it is by default
            return super()._sample_random(
                processed_logits, expanded_idx_mapping, idx_mapping_np, pos, None, None, *rest
            )
        states = self.sampling_states
        sampled = torch.ops.npu_ops.seeded_sample(
            processed_logits.float(), expanded_idx_mapping.long(), states.temperature.gpu, states.seeds.gpu, pos.long()
        )
        return sampled, processed_logits


def _filtered(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Return `logits` without what lies outside the k highest and the nucleus p; in place where they are float32."""
    if k is None and p is None:
        return logits
    logits = logits.float()
    torch.ops.npu_ops.top_k_top_p(logits, k, p)
    return logits
