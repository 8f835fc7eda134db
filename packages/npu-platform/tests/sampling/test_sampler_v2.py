"""The V2 runner's sampler filters, penalises and chooses by npu-ops' kernels, and leaves the model's logits alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)
from vllm.v1.worker.gpu.states import RequestState

from npu_platform import compat
from npu_platform.v2.sampler import NPUPenaltiesState, NPUSamplerV2
from tests.support.vllm_process import run_module

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


def test_a_temperature_of_nought_takes_the_highest_beside_others(greedy: Any) -> None:
    temperature = torch.tensor([0.0, 1.0])
    greedy.use_fp64_gumbel = False
    greedy.sampling_states.temperature = SimpleNamespace(np=temperature.numpy(), gpu=temperature.to("npu"))
    greedy.sampling_states.seeds = SimpleNamespace(gpu=torch.tensor([1, 1], device="npu"))
    logits, positions = torch.randn(2, 500, dtype=torch.bfloat16).to("npu"), torch.tensor([4, 5], device="npu")

    def chosen() -> torch.Tensor:
        tokens, left = greedy._sample_random(
            logits, torch.arange(2, device="npu"), ROWS[:2], positions, None, None, False
        )
        assert left is logits
        return tokens.cpu()

    tokens = chosen()
    assert tokens[0] == logits[0].argmax().cpu()
    assert torch.equal(chosen(), tokens), "a seed and a position give a token"
    others = set()
    for _ in range(9):
        positions += 1
        others.add(int(chosen()[1]))
    assert len(others) > 1, "another position gives another token"


def test_nobody_who_wants_no_penalty_is_penalised(logits: torch.Tensor) -> None:
    state = NPUPenaltiesState.__new__(NPUPenaltiesState)
    state.use_penalty = np.zeros(3, dtype=bool)
    given = logits.clone()
    assert state.apply(logits, SimpleNamespace(idx_mapping_np=ROWS)) is logits
    assert torch.equal(logits, given)


def test_choices_and_penalties_are_those_of_vllms_triton_kernels() -> None:
    pytest.importorskip("triton")
    done = run_module("tests.support.v2_sampling")
    assert done.stdout.splitlines()[-1:] == ["choices and penalties are equal"], done.stderr[-2000:]


class OfUser(LogitsProcessor):
    """A processor of a user's, which counts how often it is asked to bring its numbers to the device."""

    asked = 0

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return False

    def apply_staged_writes(self) -> None:
        self.asked += 1

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return logits


def test_what_requests_want_is_brought_to_the_device_when_one_was_added() -> None:
    device = torch.device("npu")
    with compat.buffers_of_npu():
        requests = RequestState(4, 16, 16, 0, 100, device)
        config, states = VllmConfig(), LogitsProcRequestState.from_request_state(requests)
        user = OfUser(config, states)
        sampler = NPUSamplerV2(
            vllm_config=config,
            max_num_reqs=4,
            vocab_size=100,
            device=device,
            req_states=requests,
            custom_logits_processors=[user],
        )
    sampler.add_request(1, SamplingParams(temperature=0.5, top_k=7, min_tokens=2))
    sampler.apply_staged_writes()
    of_device = sampler.sampling_states.temperature.gpu
    assert (of_device[1].item(), sampler.sampling_states.top_k.gpu.tolist()) == (0.5, [100, 7, 100, 100])
    sampler.apply_staged_writes()
    assert sampler.sampling_states.temperature.gpu is of_device, "nothing changed, so nothing is copied"
    sampler.add_request(2, SamplingParams(temperature=0.25, seed=5, logit_bias={3: 1.5}))
    sampler.apply_staged_writes()
    assert sampler.sampling_states.temperature.gpu.tolist() == [0.0, 0.5, 0.25, 0.0]
    assert sampler.sampling_states.seeds.gpu[2].item() == 5
    assert sampler.logits_processors[0].num_logit_bias.gpu.tolist() == [0, 0, 1, 0]
    assert user.asked == 3, "what a user's processor brings may change in any step"
