"""NPUSampler: vLLM's sampler with npu-ops' filter in place of a sort of the whole vocabulary."""

from __future__ import annotations

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, random_sample
from vllm.v1.sample.sampler import Sampler


class NPUSampler(Sampler):
    """vLLM's V1 sampler whose top-k and top-p filter is ``npu_ops::top_k_top_p``."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        """Build vLLM's sampler, then put the filter in its place."""
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self.topk_topp_sampler = NPUTopKTopPSampler(logprobs_mode, use_fp64_gumbel)

    @staticmethod
    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        """Return int64 [batch], the first maximum of each row of logits [batch, vocabulary]."""
        return torch.ops.npu_ops.argmax(logits).view(-1)


class NPUTopKTopPSampler(TopKTopPSampler):
    """Filters logits [batch, vocabulary] by top-k and top-p, then samples (Gumbel-max by exponential noise)."""

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
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        return random_sample(probs, generators, self.use_fp64_gumbel), processed
