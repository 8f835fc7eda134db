"""The V2 runner's sampler filters by npu-ops' kernel as vLLM does by its own, and leaves the model's logits alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from npu_platform.v2.sampler import NPUSamplerV2

pytestmark = pytest.mark.usefixtures("npu_ops")

ROWS = np.arange(3)


@pytest.fixture
def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 500).to("npu") * 2


@pytest.fixture
def greedy() -> Any:
    """Return one whose requests are greedy and want logprobs of the logits that are left: no noise, so no kernel of vLLM's."""
    sampler = NPUSamplerV2.__new__(NPUSamplerV2)
    sampler.logprobs_mode = "processed_logprobs"
    sampler.needs_logits_processing = np.zeros(3, dtype=bool)
    sampler.sampling_states = SimpleNamespace(temperature=SimpleNamespace(np=np.zeros(3)))
    return sampler


@pytest.mark.parametrize(("k", "p"), [(20, None), (None, 0.8), (50, 0.9)])
def test_what_is_left_equals_vllms(greedy: Any, logits: torch.Tensor, k: int | None, p: float | None) -> None:
    ks = None if k is None else torch.full((3,), k, device="npu")
    ps = None if p is None else torch.full((3,), p, device="npu")
    given = logits.clone()
    tokens, left = greedy._sample_random(given, torch.arange(3, device="npu"), ROWS, None, ks, ps)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(left, apply_top_k_top_p(logits.clone(), ks, ps))
    assert torch.equal(given, logits), "they are the model's own, of which raw logprobs are made"


def test_logits_that_are_a_copy_are_filtered_in_place(greedy: Any, logits: torch.Tensor) -> None:
    greedy.needs_logits_processing[1] = True
    ks = torch.full((3,), 20, device="npu")
    _, left = greedy._sample_random(logits, torch.arange(3, device="npu"), ROWS, None, ks, None)
    assert left.data_ptr() == logits.data_ptr()
    assert (left > -torch.inf).sum(-1).tolist() == [20] * 3
