"""A cache of the Hugging Face hub with small random models under the names that vLLM's tests ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers
import transformers

from tests.support import models

if TYPE_CHECKING:
    from pathlib import Path

REVISION = "0" * 40
_SMALL = {"vocab_size": models.VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_GPT2_TOKENS = 50257


def fill(hub: Path) -> None:
    """Write the models that are not there yet into ``hub/models--ORGANISATION--NAME``."""
    for name, make in MODELS.items():
        place = hub / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots" / REVISION
        if snapshot.exists():
            continue
        make(snapshot)
        (_add_bytes_tokenizer if make is _gpt2 else _add_tokenizer)(snapshot)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(REVISION)


def _llama(folder: Path) -> Path:
    return models.tiny_llama(folder, max_position_embeddings=4096)


def _qwen3(folder: Path) -> Path:
    return models.tiny_qwen3(folder, max_position_embeddings=4096)


def _opt(folder: Path) -> Path:
    shape = {"vocab_size": models.VOCABULARY, "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 8, "word_embed_proj_dim": 128, "max_position_embeddings": 2048}
    return models._save(transformers.OPTConfig(**shape), folder, 0)


def _qwen2(folder: Path) -> Path:
    return models._save(transformers.Qwen2Config(max_position_embeddings=4096, **_SMALL), folder, 0)


def _gpt2(folder: Path) -> Path:
    shape = {"vocab_size": _GPT2_TOKENS, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    return models._save(transformers.GPT2Config(**shape), folder, 0)


def _granite_moe(folder: Path) -> Path:
    shape = {"vocab_size": models.VOCABULARY, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    return models._save(transformers.GraniteMoeConfig(max_position_embeddings=4096, **shape), folder, 0)


MODELS = {
    "hmellor/tiny-random-LlamaForCausalLM": _llama,
    "meta-llama/Llama-3.2-1B": _llama,
    "meta-llama/Llama-3.2-1B-Instruct": _llama,
    "meta-llama/Meta-Llama-3-8B": _llama,
    "huggyllama/llama-7b": _llama,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama,
    "Qwen/Qwen3-0.6B": _qwen3,
    "Qwen/Qwen2-1.5B-Instruct": _qwen2,
    "Qwen/Qwen2.5-0.5B": _qwen2,
    "openai-community/gpt2": _gpt2,
    "gpt2": _gpt2,
    "distilbert/distilgpt2": _gpt2,
    "facebook/opt-125m": _opt,
    "ibm-research/PowerMoE-3b": _granite_moe,
}


def _add_tokenizer(folder: Path) -> None:
    """One token a word, of whatever text; the words of ids have no meaning either."""
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(models.VOCABULARY)}, unk_token="w7")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w7", pad_token="w0", bos_token="w1", eos_token="w2"
    )
    made.save_pretrained(folder)


def _add_bytes_tokenizer(folder: Path) -> None:
    """The ids of bytes and of the end of a text that GPT-2 has, which tests of grammars name, and its pairs of JSON."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [("\u0120", '"'), ("{", '"'), ('"', ":"), ('"', "}")]  # the first is a space
    words = [*alphabet, *("".join(pair) for pair in pairs)]
    words += [f"<w{number}>" for number in range(len(words), _GPT2_TOKENS - 1)]
    end = "<|endoftext|>"
    vocabulary = {word: number for number, word in enumerate([*words, end])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=end, bos_token=end, eos_token=end)
    made.save_pretrained(folder)
