"""NPUSampler: vLLM's sampler with npu-ops' kernels for the steps that walk the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

_FEW_LOGPROBS = 1024
"""Up to so many, logprobs are found in one pass over the vocabulary; beyond, by torch's sort."""


class NPUSampler(Sampler):
    """vLLM's V1 sampler; penalties, min-p, top-k, top-p, the choice and the logprobs run as kernels of npu-ops."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        """Build vLLM's sampler, then put the filter in its place; `use_fp64_gumbel` is always met."""
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self.topk_topp_sampler = NPUTopKTopPSampler(logprobs_mode, use_fp64_gumbel)

    @staticmethod
    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        """Return int64 [batch], the first maximum of each row of logits [batch, vocabulary]."""
        return torch.ops.npu_ops.argmax(logits).view(-1)

    @staticmethod
    def apply_penalties(
        logits: torch.Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        """Penalise in place the tokens of prompts and outputs; logits float32 [batch, vocabulary]."""
        if not sampling_metadata.no_penalties:
            assert sampling_metadata.prompt_token_ids is not None
            outputs = make_tensor_with_pad(output_token_ids, pad=-1, device="cpu", dtype=torch.int64)
            torch.ops.npu_ops.apply_penalties(
                logits,
                sampling_metadata.prompt_token_ids,
                outputs.to(logits.device),
                sampling_metadata.presence_penalties,
                sampling_metadata.frequency_penalties,
                sampling_metadata.repetition_penalties,
            )
        return logits

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample as vLLM does, with the min-p mask of npu-ops."""
        metadata = replace(sampling_metadata, logitsprocs=_with_min_p_kernel(sampling_metadata.logitsprocs))
        return super().sample(logits, metadata, logprobs_mode_override)

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
        if self._processor.min_p_count:
            torch.ops.npu_ops.min_p(logits, self._processor.min_p.view(-1))
        return logits


def _with_min_p_kernel(processors: LogitsProcessors) -> LogitsProcessors:
    if not any(type(processor) is MinPLogitsProcessor for processor in processors.argmax_invariant):
        return processors
    replaced = LogitsProcessors()
    replaced.non_argmax_invariant = processors.non_argmax_invariant
    replaced.argmax_invariant = [
        _MinPKernel(processor) if type(processor) is MinPLogitsProcessor else processor
        for processor in processors.argmax_invariant
    ]
    return replaced


def _uniform(rows: int, generators: dict[int, torch.Generator], device: torch.device) -> torch.Tensor:
    """Return float64 [rows] in [0, 1): each row's from its own generator, if it has one."""
    uniform = torch.empty(rows, dtype=torch.float64, device=device)
    if len(generators) != rows:
        uniform.uniform_()
    for row, generator in generators.items():
        uniform[row : row + 1].uniform_(generator=generator)
    return uniform
