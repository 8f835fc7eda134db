"""Speculation beside other features of vLLM: each request gets the tokens that it would get without drafts.

By day grammars and drawn tokens; by night the rest, with an EAGLE head.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
import transformers

from npu_platform.demo import MODEL
from tests.support import adapters, drafters, judges, models, truth
from tests.support.engine_run import EngineRun, run_engine, run_scenarios
from tests.support.transformers_reference import assert_greedy, load, next_token_logprobs

if TYPE_CHECKING:
    from pathlib import Path

DRAFTS = 3
NEW = 12
GREEDY = {"temperature": 0.0, "max_tokens": NEW}
PROMPTS = models.prompt_token_ids([1, 2, 15, 16, 17, 40, 300])
LONG_ANSWERS = models.prompt_token_ids([150] * 8, seed=5)
TWO_DEVICES = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB"}
# Settings of an EAGLE head, and of its engine, that change no token.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eager": ({"enforce_eager": True}, {"enforce_eager": True}),
    "asynchronous": ({}, {"async_scheduling": True}),
    "unpadded": ({"disable_padded_drafter_batch": True}, {}),
    "short-drafter": ({"max_model_len": 48}, {}),
    "crowded": ({}, {"max_model_len": 384, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 64}),
    "cache-in-codes": ({"kv_cache_dtype": "fp8", "attention_backend": "NPU_PAGED"}, {}),
}
MATCH = r"[a-f]{3} [0-9]{4}-(one|two|three)\."
DRAWN = {"temperature": 0.9, "top_k": 3, "max_tokens": 3}
DRAWS = 600
FEW = 5  # expected draws, below which a count is added to others


def speculation(method: str, model: Path | str, **more: Any) -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": DRAFTS, "model": str(model)}
    return {"speculative_config": config | more}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="module")
def head(llama: Path) -> Path:
    drafters.eagle(llama.parent / "eagle", llama)
    return llama.parent / "eagle"


def test_grammars(tmp_path: Path) -> None:
    """The demo model drafts for itself, knowing of no grammar, and for a prompt without one in the same batch."""
    words = transformers.AutoTokenizer.from_pretrained(MODEL)
    prompt = words("A code: ")["input_ids"]
    matching = {"structured_outputs": {"regex": MATCH}, "ignore_eos": False, "detokenize": True}
    greedy = {"temperature": 0.0, "max_tokens": 40}
    rounds = [{"prompts": [prompt, prompt[:2]], "sampling": greedy | more} for more in (matching, {})]
    engine = drafters.ENGINE | {"model": str(MODEL), "skip_tokenizer_init": False}
    plain, drafted = run_scenarios(
        tmp_path,
        [{"engine": engine | more, "rounds": rounds} for more in ({}, speculation("draft_model", MODEL))],
    )
    assert drafted.metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert [drafted.tokens(number) for number in range(2)] == [plain.tokens(number) for number in range(2)]
    for tokens in drafted.tokens(0):
        assert re.fullmatch(MATCH, words.decode(tokens, skip_special_tokens=True))


@pytest.fixture(scope="module")
def drawn(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """Many answers to one prompt; the drafts are the likeliest tokens of a noisy copy, or drawn as the target's are."""
    folder = tmp_path_factory.mktemp("drawn")
    noisy = noisy_copy(llama, folder / "noisy")
    rounds = [{"prompts": PROMPTS[2:3] * DRAWS, "sampling": DRAWN}]
    engine = {"model": str(llama)} | drafters.ENGINE | {"max_num_seqs": 64, "cudagraph_capture_sizes": [256]}
    kinds = ("greedy", "probabilistic")
    scenarios = [
        {"engine": engine | speculation("draft_model", noisy, draft_sample_method=kind), "rounds": rounds}
        for kind in kinds
    ]
    return dict(zip(kinds, run_scenarios(folder, scenarios), strict=True))


def noisy_copy(target: Path, folder: Path, noise: float = 0.002) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["greedy", "probabilistic"])
def test_drawn_tokens_follow_the_target(kind: str, llama: Path, drawn: dict[str, EngineRun]) -> None:
    """Among 600 answers, each of three words comes as often as the target says."""
    run, prompt = drawn[kind], PROMPTS[2]
    drafted = run.metrics["vllm:spec_decode_num_draft_tokens"]
    assert 0.01 < run.metrics["vllm:spec_decode_num_accepted_tokens"] / drafted < 0.95
    expected = {
        (first, second, third): DRAWS * p * q * r
        for first, p in choices(llama, prompt)
        for second, q in choices(llama, [*prompt, first])
        for third, r in choices(llama, [*prompt, first, second])
    }
    counted = Counter(map(tuple, run.tokens(0)))
    assert set(counted) <= set(expected)
    many = [words for words, number in expected.items() if number >= FEW]
    pairs = [(counted[words], expected[words]) for words in many]
    pairs.append((DRAWS - sum(counted[words] for words in many), DRAWS - sum(expected[words] for words in many)))
    surprise = sum((found - number) ** 2 / number for found, number in pairs)
    assert surprise < unlikely(len(pairs) - 1)


def unlikely(freedom: int) -> float:
    """Return what chi-square exceeds once in a thousand times (Wilson and Hilferty 1931)."""
    share = 2 / (9 * freedom)
    return freedom * (1 - share + 3.09 * share**0.5) ** 3


def choices(folder: Path, tokens: list[int]) -> list[tuple[int, float]]:
    """Return the tokens that may come next, with their probabilities."""
    logits = next_token_logprobs(load(folder), tokens, [0])[0] / DRAWN["temperature"]
    best = logits.topk(DRAWN["top_k"])
    return list(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))


@pytest.fixture(scope="module")
def runs(llama: Path, head: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    rounds = [{"prompts": PROMPTS, "sampling": GREEDY}]
    many = [{"prompts": LONG_ANSWERS, "sampling": GREEDY | {"max_tokens": 60}}]
    scenarios = [
        {
            "engine": {"model": str(llama)} | drafters.ENGINE | engine | speculation("eagle", head, **drafting),
            "rounds": rounds + many * (name == "crowded"),
        }
        for name, (drafting, engine) in SETTINGS.items()
    ]
    return dict(zip(SETTINGS, run_scenarios(tmp_path_factory.mktemp("runs"), scenarios), strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, llama: Path, runs: dict[str, EngineRun]) -> None:
    run = runs[name]
    assert run.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert (run.metrics["vllm:num_preemptions"] > 0) == (name == "crowded")
    assert_target(llama, run)
    for prompt, output in zip(LONG_ANSWERS, run.tokens(1) if name == "crowded" else [], strict=False):
        assert_greedy(load(llama), prompt, output)


@pytest.mark.nightly
def test_adapters(llama: Path, head: Path, tmp_path: Path) -> None:
    """A request's drafts are of the head alone, its tokens of the target with the request's adapter."""
    folder = adapters.adapter(tmp_path / "adapter", load(llama), ["q_proj", "v_proj", "down_proj"], 8, seed=1)
    asked = {"prompts": PROMPTS, "lora": [str(folder), None] * 3 + [str(folder)], "sampling": GREEDY}
    engine = drafters.ENGINE | {"enable_lora": True, "max_loras": 2}
    run = run_engine(tmp_path, llama, [asked], **engine, **speculation("eagle", head))
    judge = judges.of_adapters(llama)
    for request, output in zip(judges.requests(asked), run.tokens(0), strict=True):
        assert judge(request, output).argmax(-1).tolist() == output


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_tensor_parallel(method: str, llama: Path, head: Path, tmp_path: Path) -> None:
    """Ranks find the likeliest token of their part of the vocabulary each, or all of all."""
    model, more = (head, {"use_local_argmax_reduction": True}) if method == "eagle" else (llama, {})
    engine = (
        drafters.ENGINE | {"tensor_parallel_size": 2} | speculation(method, model, draft_tensor_parallel_size=2, **more)
    )
    run = run_engine(tmp_path, llama, [{"prompts": PROMPTS, "sampling": GREEDY}], TWO_DEVICES, **engine)
    assert run.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert_target(llama, run)


@pytest.mark.nightly
def test_bfloat16(llama: Path, head: Path, tmp_path: Path) -> None:
    """Drafted rows are as near to float32 truth as transformers' own in bfloat16, whatever the drafter's weights."""
    asked = {"prompts": PROMPTS, "sampling": GREEDY | {"logprobs": 1}}
    noisy = noisy_copy(llama, tmp_path / "noisy")
    engines = (speculation("eagle", head, quantization="fp8"), speculation("draft_model", noisy))
    scenarios = [
        {"engine": {"model": str(llama)} | drafters.ENGINE | {"dtype": "bfloat16"} | engine, "rounds": [asked]}
        for engine in engines
    ]
    for run in run_scenarios(tmp_path, scenarios):
        exact, rounded = (judges.of_text(llama, dtype) for dtype in (torch.float32, torch.bfloat16))
        truth.of_logprobs(exact, rounded, judges.requests(asked), run.rounds[0]).assert_within(1.5)


@pytest.mark.nightly
def test_a_drafter_with_a_vocabulary_of_its_own(llama: Path, tmp_path: Path) -> None:
    """The same model under other numbers: nearly all of what it drafts is accepted."""
    order = torch.randperm(models.VOCABULARY, generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight.copy_(weight[order].clone())
    model.save_pretrained(tmp_path / "other")
    for folder, numbers in ((tmp_path / "target", range(models.VOCABULARY)), (tmp_path / "other", order.tolist())):
        words = tokenizers.models.WordLevel(
            {f"w{number}": place for place, number in enumerate(numbers)}, unk_token="w3"
        )
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="w3")
        tokenizer.save_pretrained(folder)
    more = speculation("draft_model", tmp_path / "other", use_heterogeneous_vocab=True)
    engine = drafters.ENGINE | {"tokenizer": str(tmp_path / "target")} | more
    run = run_engine(tmp_path, llama, [{"prompts": PROMPTS, "sampling": GREEDY}], **engine)
    drafted = run.metrics["vllm:spec_decode_num_draft_tokens"]
    assert run.metrics["vllm:spec_decode_num_accepted_tokens"] > 0.6 * drafted
    assert_target(llama, run)


def assert_target(target: Path, run: EngineRun) -> None:
    """Assert that the tokens of the first round are those of the target alone."""
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert len(output) == NEW
        assert_greedy(load(target), prompt, output)
