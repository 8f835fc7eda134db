"""A program with Triton for vLLM: the V2 sampler's native kernels beside vLLM's Triton kernels for the same; it prints what is equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import murmur3_uniform64
from vllm.v1.worker.gpu.sample.penalties import apply_penalties

import npu_ops  # noqa: F401  # its kernels
from npu_platform.v2.sampler import NPUPenaltiesState

WIDTH = 9000


@triton.jit
def uniforms_kernel(out, seeds, positions, n: tl.constexpr):
    """Write the number for each seed and position, at token 0."""
    i = tl.arange(0, n)
    tl.store(out + i, murmur3_uniform64(tl.load(seeds + i), tl.load(positions + i), tl.zeros((n,), tl.uint32)))


def choices() -> None:
    """Choose by seeds and positions, and by the numbers that vLLM's hash gives for them."""
    seeds = torch.tensor([3, -1, 2**62 + 5, 0], device="npu")
    positions = torch.tensor([0, 7, 40000, 2**31 - 1], device="npu")
    uniform = torch.zeros(4, dtype=torch.float64, device="npu")
    uniforms_kernel[(1,)](uniform, seeds, positions, 4)
    logits, rows = torch.randn(4, 20001).to("npu"), torch.arange(4, device="npu")
    tokens = torch.ops.npu_ops.seeded_sample(logits, rows, torch.ones(4).to("npu"), seeds, positions)
    assert torch.equal(tokens, torch.ops.npu_ops.random_sample(logits, uniform)), (tokens, uniform)


def penalties(requests: list[int], drafts: list[int]) -> None:
    """Penalise four rows."""
    state = penalties_state()
    rows, places = torch.tensor(requests), torch.tensor(drafts, dtype=torch.int32).to("npu")
    logits = torch.randn(4, WIDTH).to("npu")
    tokens = torch.randint(0, WIDTH, (4,), dtype=torch.int32).to("npu")
    given = [getattr(state, f"{name}_penalty").gpu for name in ("repetition", "frequency", "presence")]
    expected = logits.clone()
    apply_penalties(expected, rows.to("npu"), tokens, places, *given, state.prompt_bin_mask, state.output_bin_counts)
    assert not torch.equal(expected, logits)
    context: Any = SimpleNamespace(idx_mapping_np=rows.numpy(), expanded_idx_mapping=rows.to("npu"))
    context.input_ids, context.expanded_local_pos = tokens, places
    assert state.apply(logits, context) is logits
    torch.testing.assert_close(logits.cpu(), expected.cpu(), rtol=1e-6, atol=1e-6)


def penalties_state() -> Any:
    """Return the state of four requests, of which the first wants no penalty."""
    state: Any = NPUPenaltiesState.__new__(NPUPenaltiesState)
    state.use_penalty = np.array([False, True, True, True])
    of_requests = {"repetition": [1, 1.2, 0.8, 1.5], "frequency": [0, 0.1, 0.3, 0], "presence": [0, 0, 0.4, 1]}
    for name, values in of_requests.items():
        setattr(state, f"{name}_penalty", SimpleNamespace(gpu=torch.tensor(values, dtype=torch.float32).to("npu")))
    state.prompt_bin_mask = torch.randint(-(2**31), 2**31, (4, -(-WIDTH // 32))).int().to("npu")
    state.output_bin_counts = (torch.rand(4, WIDTH) < 0.01).int().mul(3).to("npu")
    return state


if __name__ == "__main__":
    torch.manual_seed(0)
    choices()
    penalties([2, 1, 3, 0], [0, 0, 0, 0])
    penalties([2, 2, 2, 3], [0, 1, 2, 0])
    print("choices and penalties are equal")
