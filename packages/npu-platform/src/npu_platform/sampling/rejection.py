"""NPURejectionSampler: vLLM's acceptance of drafted tokens, with npu-ops' kernels for what walks the vocabulary."""

from __future__ import annotations

import torch
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from npu_platform import compat


def mask_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Mask logits [tokens, vocabulary] in place, without a sort of the whole vocabulary, and return them."""
    if k is not None or p is not None:
        torch.ops.npu_ops.top_k_top_p(logits, k, p)
    return logits


class NPURejectionSampler(RejectionSampler):
    """vLLM's rejection sampler; penalties, top-k and top-p of the drafted rows run as kernels of npu-ops."""

    # vLLM's own methods; only the mask of top-k and top-p is another.
    forward = compat.reading(
        RejectionSampler.forward,
        apply_sampling_constraints=compat.reading(
            rejection_sampler.apply_sampling_constraints, apply_top_k_top_p=mask_top_k_top_p
        ),
    )

    @staticmethod
    def apply_penalties(
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        metadata: SpecDecodeMetadata,
        repeat_indices: torch.Tensor,
        output_token_ids: list[list[int]],
    ) -> torch.Tensor:
        """Penalise in place logits float32 [tokens, vocabulary]; a row's outputs end with the drafts before its own."""
        if not sampling_metadata.no_penalties:
            assert sampling_metadata.prompt_token_ids is not None
            outputs = make_tensor_with_pad(output_token_ids, pad=-1, device="cpu", dtype=torch.int64)
            torch.ops.npu_ops.apply_penalties(
                logits,
                sampling_metadata.prompt_token_ids[repeat_indices],
                outputs.to(logits.device),
                sampling_metadata.presence_penalties[repeat_indices],
                sampling_metadata.frequency_penalties[repeat_indices],
                sampling_metadata.repetition_penalties[repeat_indices],
            )
        return logits
