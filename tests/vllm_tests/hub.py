"""A cache of the Hugging Face hub with small random models under the names that vLLM's tests ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers
import transformers

from tests.support import drafters, models

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[Path], Path]

REVISION = "0" * 40
_SMALL = {"vocab_size": models.VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_GPT2_TOKENS = 50257
_END = "<|endoftext|>"


def fill(hub: Path, wanted: dict[str, Make] | None = None) -> None:
    """Write what is not there yet into ``hub/models--ORGANISATION--NAME``; without `wanted` :data:`MODELS`.

    A model gets a tokenizer where it has none; an adapter has no `config.json`, and gets none.
    """
    for name, make in (MODELS if wanted is None else wanted).items():
        place = hub / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots" / REVISION
        if snapshot.exists():
            continue
        make(snapshot)
        if (snapshot / "config.json").exists() and not (snapshot / "tokenizer_config.json").exists():
            (add_bytes_tokenizer if make is gpt2 else _add_tokenizer)(snapshot)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(REVISION)


def _llama(folder: Path) -> Path:
    return models.tiny_llama(folder, max_position_embeddings=4096)


def _qwen3(folder: Path) -> Path:
    return models.tiny_qwen3(folder, max_position_embeddings=4096)


def opt(folder: Path, heads: int = 8) -> Path:
    size = 16 * heads
    shape = {"vocab_size": models.VOCABULARY, "hidden_size": size, "ffn_dim": 2 * size, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": heads, "word_embed_proj_dim": size, "max_position_embeddings": 2048}
    return models._save(transformers.OPTConfig(**shape), folder, 0)


def qwen2(folder: Path) -> Path:
    return models._save(transformers.Qwen2Config(max_position_embeddings=4096, **_SMALL), folder, 0)


def gpt2(folder: Path) -> Path:
    shape = {"vocab_size": _GPT2_TOKENS, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    return models._save(transformers.GPT2Config(**shape), folder, 0)


def granite_moe(folder: Path) -> Path:
    """Granite's mixture, of which the token that ends a text is not one that the model can say: tests count on some text."""
    shape = {"vocab_size": models.VOCABULARY, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    models._save(transformers.GraniteMoeConfig(max_position_embeddings=4096, eos_token_id=None, **shape), folder, 0)
    _add_tokenizer(folder, end="</s>")
    return folder


def deepseek_mtp(folder: Path) -> Path:
    """DeepSeek-V3 with experts behind its first layer, and a head for multi-token prediction with experts, too."""
    shape = {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_method": "noaux_tc"}
    drafters.deepseek_with_head(folder, moe_intermediate_size=128, max_position_embeddings=4096, **shape)
    return folder


MODELS = {
    "hmellor/tiny-random-LlamaForCausalLM": _llama,
    "meta-llama/Llama-3.2-1B": _llama,
    "meta-llama/Llama-3.2-1B-Instruct": _llama,
    "meta-llama/Meta-Llama-3-8B": _llama,
    "huggyllama/llama-7b": _llama,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama,
    "Qwen/Qwen3-0.6B": _qwen3,
    "Qwen/Qwen2-1.5B-Instruct": qwen2,
    "Qwen/Qwen2.5-0.5B": qwen2,
    "openai-community/gpt2": gpt2,
    "gpt2": gpt2,
    "distilbert/distilgpt2": gpt2,
    "facebook/opt-125m": opt,
    "Qwen/Qwen3.5-0.8B": models.tiny_qwen3_next,
    "BAAI/bge-base-en-v1.5": models.tiny_bert,
    "ibm-research/PowerMoE-3b": granite_moe,
}


def _add_tokenizer(folder: Path, end: str = "w2") -> None:
    """One token a word, of whatever text; the words of ids have no meaning either. `end` ends a text."""
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(models.VOCABULARY)}, unk_token="w7")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w7", pad_token="w0", bos_token="w1", eos_token=end
    )
    made.save_pretrained(folder)


def add_bytes_tokenizer(
    folder: Path,
    size: int = _GPT2_TOKENS,
    whole: tuple[str, ...] = (),
    first: tuple[str, ...] = (),
    special: tuple[str, ...] = (),
    template: str | None = None,
) -> None:
    """The ids of bytes and of the end of a text that GPT-2 has, which tests of grammars name, and its pairs of JSON.

    `whole` are words that are one token each behind a space, `first` those without one; `special` are the tokens before the
    last of `size`, which ends a text; `template` writes the messages of a chat.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [("\u0120", '"'), ("{", '"'), ('"', ":"), ('"', "}")]  # the first is a space
    pieces = [("\u0120", *word) for word in whole] + [tuple(word) for word in first]
    parts = (("".join(piece[:end]), piece[end]) for piece in pieces for end in range(1, len(piece)))
    pairs = list(dict.fromkeys((*pairs, *parts)))
    words = [*alphabet, *("".join(pair) for pair in pairs)]
    words += [f"<w{number}>" for number in range(len(words), size - 1 - len(special))]
    vocabulary = {word: number for number, word in enumerate([*words, *special, _END])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_END,
        bos_token=_END,
        eos_token=_END,
        additional_special_tokens=list(special),
        chat_template=template,
    )
    made.save_pretrained(folder)
