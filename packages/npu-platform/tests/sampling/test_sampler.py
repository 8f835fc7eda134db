from __future__ import annotations

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.sampler import Sampler

from npu_platform.sampling.sampler import NPUSampler

pytestmark = pytest.mark.usefixtures("npu_ops")  # the sampler calls its kernels

BATCH, VOCABULARY = 3, 500


@pytest.fixture
def metadata():
    def build(**values):
        fields = dict.fromkeys(SamplingMetadata.__dataclass_fields__)
        fields.update(
            temperature=torch.ones(BATCH, device="npu"),
            all_greedy=False,
            all_random=True,
            generators={},
            no_penalties=True,
            output_token_ids=[[] for _ in range(BATCH)],
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )
        return SamplingMetadata(**{**fields, **values})

    return build


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(BATCH, VOCABULARY).to("npu") * 2


def test_penalties_equal_vllms(metadata, logits):
    outputs = [[1, 2, 2, 499, -1], [], [7]]
    prompts = torch.randint(0, VOCABULARY + 1, (BATCH, 9)).to("npu")
    strengths = [torch.tensor(values, device="npu") for values in ([0.1, 0.2, 0.3], [0.5, 0.0, 1.0], [1.2, 0.8, 1.0])]
    expected = apply_all_penalties(logits.clone(), prompts, *strengths, outputs)
    step = metadata(
        no_penalties=False,
        prompt_token_ids=prompts,
        presence_penalties=strengths[0],
        frequency_penalties=strengths[1],
        repetition_penalties=strengths[2],
    )
    torch.testing.assert_close(NPUSampler().apply_penalties(logits.clone(), step, outputs), expected)


def test_logprobs_equal_vllms(logits):
    logprobs, tokens = NPUSampler.compute_logprobs(logits), torch.tensor([4, 0, 499], device="npu")
    for ours, theirs in zip(
        NPUSampler.gather_logprobs(logprobs, 6, tokens), Sampler.gather_logprobs(logprobs, 6, tokens), strict=True
    ):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_the_greedy_choice_reads_the_logits_as_they_are(metadata, logits):
    step = metadata(all_greedy=True, all_random=False, temperature=None)
    narrow = logits.to(torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.PrivateUse1]) as profiler:
        output = NPUSampler()(narrow, step)
    # the second makes int32 of the choices
    assert [event.name for event in profiler.events()] == ["npu_ops::argmax", "aten::_copy_from"]
    theirs = Sampler()(narrow, step)
    assert torch.equal(output.sampled_token_ids, theirs.sampled_token_ids)
    assert output.sampled_token_ids.dtype == theirs.sampled_token_ids.dtype


@pytest.mark.parametrize(
    ("processor", "state"),
    [(LogitBiasLogitsProcessor, {"biases": {1: {7: 100.0}}}), (MinTokensLogitsProcessor, {"min_toks": {1: ()}})],
)
def test_a_processor_that_some_request_wants_is_applied(metadata, logits, processor, state):
    made = processor.__new__(processor)
    made.__dict__.update(state)
    made.apply = lambda logits: logits.index_fill_(1, torch.tensor([7], device="npu"), 100.0)
    step = metadata(all_greedy=True, all_random=False, temperature=None, logitsprocs=LogitsProcessors([made]))
    assert NPUSampler()(logits.clone(), step).sampled_token_ids.flatten().tolist() == [7] * BATCH
    made.__dict__[next(iter(state))] = {}
    idle = NPUSampler()(logits.clone(), step).sampled_token_ids.flatten()
    assert torch.equal(idle, logits.argmax(-1).to(torch.int32))


def test_min_p_runs_where_vllms_processor_holds_its_state(metadata, logits):
    processor = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
    processor.min_p_count, processor.min_p = 1, torch.full((BATCH, 1), 0.9999, device="npu")
    step = metadata(logitsprocs=LogitsProcessors([processor]))
    sampled, _ = NPUSampler().sample(logits.clone(), step)
    assert torch.equal(sampled, logits.argmax(-1))
    assert type(step.logitsprocs.argmax_invariant[0]) is MinPLogitsProcessor


def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch(metadata, logits):
    def draw(rows, seeded):
        generators = {rows.index(row): torch.Generator("npu").manual_seed(seed) for row, seed in seeded.items()}
        step = metadata(generators=generators, temperature=torch.ones(len(rows), device="npu"))
        return [NPUSampler().sample(logits[rows].clone(), step)[0].tolist() for _ in range(4)]

    together, alone = draw([0, 1, 2], {1: 5, 2: 6}), draw([1], {1: 5})
    assert [step[1] for step in together] == [step[0] for step in alone]
    assert len({step[1] for step in together}) > 1
