"""NPUSampler: vLLM's sampler with npu-ops' kernels for the steps that walk the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from npu_platform.sampling.outputs import OutputTokens

_FEW_LOGPROBS = 1024
"""Up to so many, logprobs are found in one pass over the vocabulary; beyond, by torch's sort."""


class NPUSampler(Sampler):
    """vLLM's V1 sampler; penalties, min-p, top-k, top-p, the choice and the logprobs run as kernels of npu-ops."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        """Build vLLM's sampler, then put the filter in its place; `use_fp64_gumbel` is always met."""
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self.topk_topp_sampler = NPUTopKTopPSampler(logprobs_mode, use_fp64_gumbel)
        self._outputs = OutputTokens()

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        """Sample as vLLM does; the greedy choice alone needs no copy of the logits in float32."""
        if _only_chooses(sampling_metadata):
            return SamplerOutput(self.greedy_sample(logits).to(torch.int32).unsqueeze(-1), logprobs_tensors=None)
        return super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)

    @staticmethod
    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        """Return int64 [batch], the first maximum of each row of logits [batch, vocabulary]."""
        return torch.ops.npu_ops.argmax(logits).view(-1)

    def apply_penalties(  # type: ignore[override]  # vLLM's needs no state
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        """Penalise in place the tokens of prompts and outputs; logits float32 [batch, vocabulary]."""
        if not sampling_metadata.no_penalties:
            assert sampling_metadata.prompt_token_ids is not None
            torch.ops.npu_ops.apply_penalties(
                logits,
                sampling_metadata.prompt_token_ids,
                self._outputs.follow(output_token_ids, logits.device),
                sampling_metadata.presence_penalties,
                sampling_metadata.frequency_penalties,
                sampling_metadata.repetition_penalties,
            )
        return logits

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample as vLLM does, with the min-p mask of npu-ops where a request has one."""
        if not sampling_metadata.all_greedy:
            processors = _with_min_p_kernel(sampling_metadata.logitsprocs)
            if processors is not sampling_metadata.logitsprocs:
                sampling_metadata = replace(sampling_metadata, logitsprocs=processors)
        return super().sample(logits, sampling_metadata, logprobs_mode_override)

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        """Return the given tokens' logprobs [tokens], their ranks, and the `num_logprobs` highest of each row."""
        if num_logprobs > _FEW_LOGPROBS or logprobs.dtype != torch.float32:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        return LogprobsTensors(*torch.ops.npu_ops.top_logprobs(logprobs, token_ids, num_logprobs))


class NPUTopKTopPSampler(TopKTopPSampler):
    """Filters logits [batch, vocabulary] by top-k and top-p, then samples from what is left.

    The choice inverts the distribution at one uniform number a row, from the request's own generator where it has a
    seed: the same seed and position give the same number, and with the same logits the same token.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        """Build vLLM's module, which chooses its method by platform, and choose ours."""
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self.forward = self.forward_npu

    def forward_npu(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sampled ids int64 [batch] and, when asked for, the processed logits or logprobs."""
        if k is not None or p is not None:
            torch.ops.npu_ops.top_k_top_p(logits, k, p)
        processed = None
        if self.logprobs_mode == "processed_logits":
            processed = logits
        elif self.logprobs_mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        uniform = _uniform(logits.shape[0], generators, logits.device)
        return torch.ops.npu_ops.random_sample(logits, uniform), processed


class _MinPKernel:
    """Stands in for vLLM's min-p processor while a step is sampled; the state stays there."""

    def __init__(self, processor: MinPLogitsProcessor) -> None:
        self._processor = processor

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        torch.ops.npu_ops.min_p(logits, self._processor.min_p.view(-1))
        return logits


def _with_min_p_kernel(processors: LogitsProcessors) -> LogitsProcessors:
    """Return `processors` itself, unless a request has a min-p; vLLM's processor does nothing for the others."""
    found = (processor for processor in processors.argmax_invariant if type(processor) is MinPLogitsProcessor)
    if not any(processor.min_p_count for processor in found):
        return processors
    replaced = LogitsProcessors()
    replaced.non_argmax_invariant = processors.non_argmax_invariant
    replaced.argmax_invariant = [
        _MinPKernel(processor) if type(processor) is MinPLogitsProcessor else processor
        for processor in processors.argmax_invariant
    ]
    return replaced


def _only_chooses(metadata: SamplingMetadata) -> bool:
    """Say whether all that is wanted of these logits is where the highest of each row is."""
    budget = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.no_penalties
        and metadata.max_num_logprobs is None
        and metadata.allowed_token_ids_mask is None
        and not metadata.logprob_token_ids
        and not metadata.bad_words_token_ids
        and (budget is None or not budget.has_tracked_requests())
        and all(map(_is_idle, metadata.logitsprocs.non_argmax_invariant))
    )


def _is_idle(processor: LogitsProcessor) -> bool:
    """Say whether no request of the batch has a use for one of vLLM's processors, which are there in any batch."""
    if type(processor) is LogitBiasLogitsProcessor:
        return not processor.biases
    return type(processor) is MinTokensLogitsProcessor and not processor.min_toks


def _uniform(rows: int, generators: dict[int, torch.Generator], device: torch.device) -> torch.Tensor:
    """Return float64 [rows] in [0, 1): each row's from its own generator, if it has one."""
    uniform = torch.empty(rows, dtype=torch.float64, device=device)
    if len(generators) != rows:
        uniform.uniform_()
    for row, generator in generators.items():
        uniform[row : row + 1].uniform_(generator=generator)
    return uniform
