"""What vLLM's V2 model runner alone has: its tokens are those that transformers gives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.watermarking import GumbelWatermarkDetector

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load, next_token_logprobs
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton")
pytestmark = pytest.mark.nightly

NEW = 24
GREEDY = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True}
PROMPTS = models.prompt_token_ids([1, 15, 17, 40, 100, 130])
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
PARALLEL = {"pipeline_parallel_size", "tensor_parallel_size"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 8],
}
CASES: dict[str, dict[str, Any]] = {
    "drafts in blocks": {"speculative_config": NGRAM | {"rejection_sample_method": "block"}},
    "fewer drafts in a crowd": {
        "speculative_config": NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1]]}
    },
    "drafts and preemption": {
        "speculative_config": NGRAM,
        "num_gpu_blocks_override": 24,
        "kv_cache_memory_bytes": None,
    },
    "stages, asynchronously": {"pipeline_parallel_size": 2, "async_scheduling": True},
    "ranks": {"tensor_parallel_size": 2},
    "ranks that sample their part of the batch": {"tensor_parallel_size": 2, "enable_batch_sharded_sampling": True},
    "the same, with drafts": {
        "tensor_parallel_size": 2,
        "enable_batch_sharded_sampling": True,
        "speculative_config": NGRAM,
    },
}
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
folder, engine, prompts, trace, every = map(json.loads, sys.argv[1:])
llm = LLM(folder, skip_tokenizer_init=True, return_sampling_mask=True, enable_trace_replay=True,
          logprobs_mode="processed_logprobs", **engine)
shared = {"max_tokens": len(trace), "ignore_eos": True, "detokenize": False}
kinds = [SamplingParams(temperature=1.0, top_k=5, seed=3, **shared),
         SamplingParams(temperature=1.0, top_k=every, logprobs=0, trace_decode_token_ids=trace, **shared)]
for sampling in kinds:
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False):
        one = output.outputs[0]
        chances = [step[token].logprob for step, token in zip(one.logprobs or [], one.token_ids)]
        print("SAID " + json.dumps([list(one.token_ids), one.sampling_mask.token_ids, chances]))
"""
ROUTED = """
import json, sys
from vllm import LLM, SamplingParams
folder, engine, prompts = map(json.loads, sys.argv[1:])
llm = LLM(folder, skip_tokenizer_init=True, enable_return_routed_experts=True, **engine)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
for _ in range(2):  # the second time from the prefix cache
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False):
        one = output.outputs[0]
        print("SAID " + json.dumps([list(one.token_ids), one.routed_experts.tolist(), output.num_cached_tokens]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(name: str, model: Path, tmp_path: Path) -> None:
    environ = V2 | ({"NPU_SIMULATOR_DEVICES": "2"} if CASES[name].keys() & PARALLEL else {})
    run = run_engine(tmp_path, model, [{"prompts": PROMPTS, "sampling": GREEDY}] * 2, environ, **ENGINE | CASES[name])
    assert run.platform == "npu"
    assert "npu runs vLLM's V2 model runner" in run.log
    for tokens in (run.tokens(0), run.tokens(1)):
        for prompt, output in zip(PROMPTS, tokens, strict=True):
            assert len(output) == NEW
            assert_greedy(load(model), prompt, output)


def test_choices_of_each_rank_are_those_of_all(model: Path, tmp_path: Path) -> None:
    """Seeds, penalties, filters and logprobs of requests whose logits only one of the ranks has."""
    samplings = [
        GREEDY,
        GREEDY | {"temperature": 1.0, "seed": 5},
        GREEDY | {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9, "logprobs": 2},
        GREEDY | {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 0},
        GREEDY | {"temperature": 1.0, "seed": 7, "min_p": 0.01, "allowed_token_ids": list(range(100, 200))},
        GREEDY | {"temperature": 1.5, "seed": 8, "frequency_penalty": 0.7, "min_tokens": 4},
    ]
    rounds = [{"prompts": PROMPTS, "sampling": samplings}, {"prompts": PROMPTS[:1], "sampling": samplings[1]}]
    ranks = V2 | {"NPU_SIMULATOR_DEVICES": "2"}
    all_, each = (
        run_engine(tmp_path / name, model, rounds, ranks, **ENGINE, tensor_parallel_size=2, **more)
        for name, more in (("all", {}), ("each", {"enable_batch_sharded_sampling": True}))
    )
    assert "Batch-sharded sampling enabled" in each.log
    assert "Batch-sharded sampling enabled" not in all_.log
    assert each.rounds == all_.rounds
    assert len({tuple(tokens) for tokens in each.tokens(0)}) == len(PROMPTS)


def test_a_users_own_processor(model: Path, tmp_path: Path) -> None:
    """Requests that it is for share the batch with others."""
    few = GREEDY | {"extra_args": {"few_tokens": 64}}
    rounds = [{"prompts": PROMPTS, "sampling": [GREEDY, few] * 3}]
    run = run_engine(tmp_path, model, rounds, V2, **ENGINE, logits_processors=["tests.support.few_tokens_v2:FewTokens"])
    for index, (prompt, output) in enumerate(zip(PROMPTS, run.tokens(0), strict=True)):
        if index % 2:
            assert max(output) < 64
        else:
            assert_greedy(load(model), prompt, output)


def test_watermarks_are_found_with_their_key_and_no_other(model: Path, tmp_path: Path) -> None:
    """By vLLM's own detector, which computes on the host."""
    sampling = {"temperature": 1.0, "max_tokens": 100, "ignore_eos": True}
    engine = ENGINE | {"watermark_config": {"key": 7}}
    run = run_engine(tmp_path, model, [{"prompts": PROMPTS, "sampling": sampling}], V2, **engine)
    for tokens in run.tokens(0):
        assert GumbelWatermarkDetector(7, p_value_threshold=1e-6).detect(tokens).is_watermarked
        assert not GumbelWatermarkDetector(8, p_value_threshold=1e-6).detect(tokens).is_watermarked


def test_masks_of_what_could_be_sampled_and_the_replay_of_a_trace(model: Path) -> None:
    trace = models.prompt_token_ids([12], seed=9)[0]
    arguments = [str(model), ENGINE, PROMPTS, trace, models.VOCABULARY]
    done = run_program(PROGRAM, *map(json.dumps, arguments), VLLM_ENABLE_V1_MULTIPROCESSING="0", **V2)
    said = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    sampled, replayed = said[: len(PROMPTS)], said[len(PROMPTS) :]
    assert len(replayed) == len(PROMPTS), done.stderr[-3000:]
    for tokens, masks, _ in sampled:
        assert all(token in mask and len(mask) == 5 for token, mask in zip(tokens, masks, strict=True))
    for prompt, (tokens, _, chances) in zip(PROMPTS, replayed, strict=True):
        assert tokens == trace
        expected = next_token_logprobs(load(model), prompt, trace)[range(len(trace)), trace]
        torch.testing.assert_close(torch.tensor(chances), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_experts_of_each_token_are_those_of_transformers(ranks: int, tmp_path: Path) -> None:
    folder = models.tiny_qwen3_moe(tmp_path / "model")
    arguments = map(json.dumps, (str(folder), ENGINE | {"tensor_parallel_size": ranks}, PROMPTS))
    done = run_program(ROUTED, *arguments, NPU_SIMULATOR_DEVICES=str(ranks), NPU_SIMULATOR_MEMORY="2GiB", **V2)
    said = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == 2 * len(PROMPTS), done.stderr[-3000:]
    assert max(cached for _, _, cached in said[len(PROMPTS) :]) > 0
    for prompt, (tokens, experts, _) in zip(PROMPTS * 2, said, strict=True):
        assert_greedy(load(folder), prompt, tokens)
        routed = torch.tensor(experts)  # [tokens, layers, experts]; the first layer is dense
        expected, sure = experts_of(load(folder), [*prompt, *tokens[:-1]])
        assert routed.shape == (len(prompt) + len(tokens) - 1, len(expected) + 1, expected[0].shape[-1])
        for layer, chosen in enumerate(expected, 1):
            assert sure[layer - 1].float().mean() > 0.9
            said_of_layer = routed[:, layer].sort(-1).values
            assert torch.equal(said_of_layer[sure[layer - 1]], chosen.sort(-1).values[sure[layer - 1]])


@torch.inference_mode()
def experts_of(model: torch.nn.Module, tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return each router's experts [tokens, chosen], and where no other comes near the last of them."""
    chosen: list[torch.Tensor] = []
    sure: list[torch.Tensor] = []

    def look(_: torch.nn.Module, __: object, outputs: tuple[torch.Tensor, ...]) -> None:
        logits, _, indices = outputs
        ordered, last = logits.softmax(-1).sort(-1, descending=True).values, indices.shape[-1] - 1
        chosen.append(indices)
        sure.append(ordered[:, last] - ordered[:, last + 1] > 1e-4)

    hooks = [module.register_forward_hook(look) for name, module in model.named_modules() if name.endswith("mlp.gate")]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return chosen, sure
