"""The cases of the engine benchmark. Plain Python: every contestant's interpreter imports it.

A prefill is the time from a prompt's arrival to its first token; a decode step is the time between two tokens of a whole
batch, each sequence of which has `context` tokens when its steps begin. A generation is a step's share of the time from the
first tokens of a batch to its last: the mean of its steps, however they come, which may be in bursts where a step is short.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
# For devices to which the other is a trifle.
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
# Experts: two engines of all 48 layers would need 120 GB, these need 12.
MIXTURE = QWEN3_06B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
# For the test of this harness: nothing that it measures is worth a look.
TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
TINY = QWEN3_06B | TINY_SIZES
TINY_MIXTURE = MIXTURE | TINY_SIZES | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
SHAPES = {
    "Qwen3-0.6B": QWEN3_06B,
    "4 layers of Qwen3-30B-A3B": MIXTURE,
    "2 layers of Qwen3-30B-A3B": MIXTURE | {"num_hidden_layers": 2},  # for peers that keep every weight twice
    "tiny": TINY,
    "tiny mixture": TINY_MIXTURE,
}
ONE_STEP = "decode batch 1 context 64"
"""The case whose step does little more than to read all weights once."""
BLOCK = 128  # tokens, the peer's; ours are not larger
SETTLE = 4  # steps of a whole batch that are not counted: the first ones of a shape choose kernels and fill caches
SPARE = 64  # steps of a part of the batch, at most
GENERATED = 256  # tokens of each sequence of a generation
FILLED = 2048  # tokens; to compute a longer context takes minutes and says nothing about its steps

_FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "top-k, top-p": _FILTERS,
    "penalties": {"temperature": 0.0, **_PENALTIES},
    "all of these, min-p": {**_FILTERS, **_PENALTIES, "min_p": 0.02},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
}
"""How tokens are chosen."""


@dataclass(frozen=True)
class Case:
    """One measurement; `samples` are of one round."""

    kind: str
    """prefill, decode or generation."""
    context: int
    batch: int = 1
    samples: int = 64
    sampling: str = "greedy"
    """A key of SAMPLING."""

    @property
    def name(self) -> str:
        """What the tables call it."""
        if self.kind == "prefill":
            return f"prefill {self.context}"
        chosen = "" if self.sampling == "greedy" else f", {self.sampling}"
        return f"{self.kind} batch {self.batch} context {self.context}{chosen}"

    @property
    def filled(self) -> bool:
        """Whether vLLM's engines get the context from its DecodeBenchConnector, which fills the cache with numbers."""
        return self.kind == "decode" and self.context > FILLED

    @property
    def steps(self) -> int:
        """Tokens that each sequence may generate: prompts come in one by one and in pieces, until then no step is whole."""
        if self.kind == "generation":
            return GENERATED
        return 1 if self.kind == "prefill" else self.samples + SETTLE + SPARE

    @property
    def whole_steps(self) -> int | None:
        """Tokens of all sequences at once that are enough; the first begins the first step."""
        return self.samples + SETTLE + 1 if self.kind == "decode" else None

    @property
    def tokens(self) -> int:
        """Tokens that its sequences hold at the end, in whole blocks."""
        return self.batch * BLOCK * -(-(self.context + self.steps) // BLOCK)


def prefills(*lengths: int) -> list[Case]:
    """Return prefills of these lengths, of fewer samples where one takes long."""
    return [Case("prefill", length, samples=5 if length < 1024 else 2 if length < 8192 else 1) for length in lengths]


MANY = [*prefills(128, 512, 2048), *(Case("decode", 64, batch) for batch in (1, 8, 32, 64))]
QUICK = [
    *MANY,
    *(Case("decode", context) for context in (512, 4096, 16384, 32000)),
]
WHOLE = [
    *prefills(128, 256, 512, 1024, 2048, 4096, 8192),
    *(Case("decode", 64, batch) for batch in (1, 2, 4, 8, 16, 32, 64)),
    *(Case("decode", context) for context in (512, 2048, 4096, 8192, 16384, 32000)),
    *(Case("decode", context, 8) for context in (512, 4096)),
]
TRIAL = [*prefills(64), Case("decode", 64, 1, 8), Case("decode", 64, 2, 8)]
SPLIT = [*prefills(512), *(Case("decode", 64, batch, 32) for batch in (1, 8, 32))]  # where the time goes
RUNNERS = [
    *prefills(512),
    *(Case("decode", 64, batch, 32) for batch in (1, 2, 4, 8, 16, 32)),
    *(Case("decode", 64, batch, 32, sampling) for sampling in list(SAMPLING)[1:] for batch in (1, 8, 32)),
]
HOST = [
    Case("generation", 16, batch, 3, sampling)
    for sampling in ("greedy", "top-k, top-p", "penalties", "5 logprobs")
    for batch in (1, 8, 32)
]
FOUR_BITS = [*prefills(128, 512, 2048), *(Case("decode", 64, batch) for batch in (1, 8, 32))]
CHOICES = {
    "quick": QUICK,
    "mixture": MANY,
    "whole": WHOLE,
    "trial": TRIAL,
    "split": SPLIT,
    "runners": RUNNERS,
    "host": HOST,
    "4-bit": FOUR_BITS,
}


def answer_each(cases: list[Case], first: dict[str, Any], measured: Callable[[Case], dict[str, Any]]) -> None:
    """Print the first line of a contestant that is asked, then one for each case whose name comes, until there are no more."""
    by_name = {case.name: case for case in cases}
    print("RESULT " + json.dumps(first | {"takes": list(by_name)}), flush=True)
    for line in sys.stdin:
        print("RESULT " + json.dumps(measured(by_name[line.rstrip("\n")])), flush=True)


def weight_bytes(shape: dict[str, object], item: int = 2) -> int:
    """Return what a step of one sequence must read of the weights at least: all layers, of experts those chosen, and the head once."""
    n = {key: value for key, value in shape.items() if isinstance(value, int)}
    attention = (2 * n["num_attention_heads"] + 2 * n["num_key_value_heads"]) * n["head_dim"] * n["hidden_size"]
    width = n["num_experts_per_tok"] * n["moe_intermediate_size"] if has_experts(shape) else n["intermediate_size"]
    layer = attention + n["hidden_size"] * (3 * width + n.get("num_experts", 0))
    return item * (n["num_hidden_layers"] * layer + n["vocab_size"] * n["hidden_size"])


def has_experts(shape: dict[str, object]) -> bool:
    """Return whether its layers are mixtures of experts."""
    return "num_experts" in shape


def longest(cases: list[Case]) -> int:
    """Return the tokens of the longest sequence."""
    return max(case.context + case.steps for case in cases)


def cache_bytes(shape: dict[str, object], cases: list[Case], item: int = 2) -> int:
    """Return the memory of keys and values that the largest case needs, with a quarter more."""
    return token_bytes(shape, item) * max(longest(cases) + BLOCK, *(case.tokens for case in cases)) * 5 // 4


def token_bytes(shape: dict[str, object], item: int = 2) -> int:
    """Return the memory of one token's keys and values in all layers."""
    n = {key: value for key, value in shape.items() if isinstance(value, int)}
    return 2 * item * n["num_hidden_layers"] * n["num_key_value_heads"] * n["head_dim"]
