"""The rows of drafted tokens are processed as vLLM's own sampler does, by other kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler, apply_sampling_constraints

from npu_platform import compat
from npu_platform.sampling import triton_bodies
from npu_platform.sampling.rejection import NPURejectionSampler, mask_top_k_top_p

pytestmark = pytest.mark.usefixtures("npu_ops")

VOCABULARY = 500


@pytest.fixture
def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(6, VOCABULARY).to("npu") * 2


@pytest.mark.parametrize(("k", "p"), [(None, None), (20, None), (None, 0.8), (50, 0.9)])
def test_masks_equal_vllms(logits: torch.Tensor, k: int | None, p: float | None) -> None:
    ks = None if k is None else torch.full((6,), k, device="npu")
    ps = None if p is None else torch.full((6,), p, device="npu")
    expected = logits.clone() if k is None and p is None else apply_top_k_top_p(logits.clone(), ks, ps)
    torch.testing.assert_close(mask_top_k_top_p(logits.clone(), ks, ps), expected)


def test_constraints_use_the_kernel(logits: torch.Tensor) -> None:
    """vLLM's function and the copy of it that forward() calls, on two requests of 4 and 2 drafts."""
    metadata = SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor([0.5, 0.0], device="npu"),
        top_k=torch.tensor([10, 30], device="npu"),
        top_p=torch.tensor([0.9, 0.5], device="npu"),
    )
    compat.register_kernels(triton_bodies.TRITON_BODIES)
    ends = torch.tensor([4, 6], dtype=torch.int32, device="npu")
    copy = NPURejectionSampler.forward.__globals__["apply_sampling_constraints"]
    assert copy.__globals__["apply_top_k_top_p"] is mask_top_k_top_p
    expected = apply_sampling_constraints(logits.clone(), ends, metadata)
    torch.testing.assert_close(copy(logits.clone(), ends, metadata), expected)


def test_penalties_equal_vllms(logits: torch.Tensor) -> None:
    strengths = [torch.tensor(values, device="npu") for values in ([0.1, 0.3], [0.5, 0.0], [1.2, 0.8])]
    metadata = SimpleNamespace(
        no_penalties=False,
        prompt_token_ids=torch.randint(0, VOCABULARY + 1, (2, 9)).to("npu"),
        **dict(zip(("presence_penalties", "frequency_penalties", "repetition_penalties"), strengths, strict=True)),
    )
    rows = torch.tensor([0, 0, 0, 0, 1, 1], device="npu")
    outputs = [[1, 2], [1, 2, 2], [1, 2, 2, 7], [1, 2, 2, 7, 1], [], [9]]
    ours, theirs = (
        sampler.apply_penalties(logits.clone(), metadata, None, rows, outputs)
        for sampler in (NPURejectionSampler, RejectionSampler)
    )
    torch.testing.assert_close(ours, theirs)
    metadata.no_penalties = True
    assert torch.equal(NPURejectionSampler.apply_penalties(logits.clone(), metadata, None, rows, outputs), logits)
