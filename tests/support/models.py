"""Makers of small random models: any test that needs weights builds them here, from a seed, without a hub.

Each maker writes a transformers checkpoint (float32 safetensors, no tokenizer) into a folder and returns the folder.
Prompts are token ids; in vLLM set ``skip_tokenizer_init=True``. Weights are wide enough that attention decides the
answer, and norm weights are not all one, so a forgotten mask, scale or weight changes the tokens. Wider (0.2) would be
chaos: bfloat16 noise would then decide the answer as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import safetensors.torch
import tokenizers
import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = [
    "ENCODERS",
    "MAKERS",
    "MIXTURES",
    "RECURRENT",
    "VOCABULARY",
    "prompt_token_ids",
    "roughen_vectors",
    "tiny_bert",
    "tiny_bloom",
    "tiny_classifier",
    "tiny_deepseek_v2",
    "tiny_deepseek_v3",
    "tiny_falcon_h1",
    "tiny_gemma2",
    "tiny_gemma3",
    "tiny_glm4_moe",
    "tiny_gpt2",
    "tiny_gpt_oss",
    "tiny_granite_hybrid",
    "tiny_jamba",
    "tiny_llama",
    "tiny_mixtral",
    "tiny_modernbert",
    "tiny_nemotron_h",
    "tiny_qwen3",
    "tiny_qwen3_moe",
    "tiny_sorter",
    "tiny_zamba2",
    "with_tokenizer",
]

VOCABULARY = 2048
"""Number of tokens of each model made here; ids 0 to 2 are left to padding, beginning and end of text."""

_MAX_TOKENS = 2048
_SPREAD = 0.1  # standard deviation of the weight matrices

# No token of a random model means "end", so a test always gets the number of tokens it asked for.
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_SHAPE: dict[str, Any] = _TOKENS | {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": _MAX_TOKENS,
    "initializer_range": _SPREAD,
}
_ENCODER_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": _SPREAD,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}


# 128 wide experts: their sum weighs about what a dense layer of 512 does.
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}

_STATES: dict[str, Any] = {"expand": 2, "conv_kernel": 4, "initializer_range": _SPREAD, "tie_word_embeddings": False}


def tiny_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Llama: grouped-query attention, rotary positions, separate output head."""
    return _save(transformers.LlamaConfig(**_SHAPE | {"tie_word_embeddings": False} | changes), folder, seed)


def tiny_qwen3(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Qwen3: as Llama, with norms of query and key and tied embeddings."""
    return _save(transformers.Qwen3Config(**_SHAPE | {"tie_word_embeddings": True} | changes), folder, seed)


def tiny_gemma3(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Gemma 3 (text): three layers of sliding window, one of full attention, two rotary bases, tied embeddings.

    The soft cap is on the final logits only: Gemma 3 has none in attention, for that take ``tiny_gemma2``.
    """
    special = {
        "query_pre_attn_scalar": 64,
        "sliding_window": 40,  # no multiple of a block, so that the window's edge falls inside one
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 30.0,
    }
    return _save(transformers.Gemma3TextConfig(**_SHAPE | special | changes), folder, seed, _calm_embeddings)


def tiny_gemma2(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Gemma 2: soft caps in attention and on the logits, sliding window in every other layer.

    Compare it with transformers' ``attn_implementation="eager"``; its "sdpa" leaves the soft cap out.
    """
    special = {
        "query_pre_attn_scalar": 64,
        "sliding_window": 40,
        "attn_logit_softcapping": 5.0,  # low enough to bend the scores of these weights
        "final_logit_softcapping": 30.0,
    }
    return _save(transformers.Gemma2Config(**_SHAPE | special | changes), folder, seed, _calm_embeddings)


def tiny_gpt2(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """GPT-2: learned positions, layer norms with bias, fused qkv, no grouped queries."""
    shape = _TOKENS | {
        "vocab_size": VOCABULARY,
        "n_positions": _MAX_TOKENS,
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 4,
        "initializer_range": 1.5 * _SPREAD,  # four heads and learned positions: attention needs more weight to be heard
    }
    return _save(transformers.GPT2Config(**shape | changes), folder, seed)


def tiny_bloom(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """BLOOM: no positions but the slopes of ALiBi, for a number of heads that is no power of two."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 384, "n_layer": 4, "n_head": 12, "initializer_range": _SPREAD}
    return _save(transformers.BloomConfig(**_TOKENS | shape | changes), folder, seed)


_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 48,
    "head_dim": 64,
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "tie_word_embeddings": False,
}


def tiny_deepseek_v2(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """DeepSeek-V2: multi-head latent attention, keys wider than values; every layer's MLP is dense."""
    return _save(transformers.DeepseekV2Config(**_SHAPE | _LATENTS | changes), folder, seed)


def tiny_deepseek_v3(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """DeepSeek-V3: as DeepSeek-V2; a layer after the last would be dense, too."""
    special = {"first_k_dense_replace": 5, "n_group": 1, "topk_group": 1}
    return _save(transformers.DeepseekV3Config(**_SHAPE | _LATENTS | special | changes), folder, seed)


def tiny_bert(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """BERT: an encoder, every token sees every other."""
    shape = _ENCODER_SHAPE | {"max_position_embeddings": 512, "attn_implementation": "eager"}
    return _save_encoder(transformers.BertConfig(**shape | changes), folder, seed, add_pooling_layer=False)


def tiny_modernbert(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """ModernBERT: an encoder with rotary positions, and a window to both sides in two layers of three."""
    shape = _ENCODER_SHAPE | {"max_position_embeddings": 512, "local_attention": 32, "attn_implementation": "eager"}
    return _save_encoder(transformers.ModernBertConfig(**shape | changes), folder, seed)


def tiny_classifier(folder: Path, *, labels: int, seed: int = 0) -> Path:
    """BERT with a head that sorts texts; with one label it scores them."""
    config = transformers.BertConfig(**_ENCODER_SHAPE | {"max_position_embeddings": 512, "num_labels": labels})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config).float()
        roughen_vectors(model)
    model.save_pretrained(folder)
    return with_tokenizer(folder)


def tiny_sorter(folder: Path, *, labels: int, seed: int = 0, **changes: Any) -> Path:
    """Qwen3 with a head that sorts texts by their last token; it is without the head that says tokens."""
    shape = _SHAPE | {"tie_word_embeddings": False, "num_labels": labels, "pad_token_id": 0} | changes
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**shape)).float()
        roughen_vectors(model)
    model.save_pretrained(folder)
    return with_tokenizer(folder)


MAKERS: dict[str, Callable[..., Path]] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "gemma3": tiny_gemma3,
    "gemma2": tiny_gemma2,
    "gpt2": tiny_gpt2,
    "bloom": tiny_bloom,
    "deepseek_v2": tiny_deepseek_v2,
}


def tiny_mixtral(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Mixtral: 2 of 8 experts by softmax."""
    special = {"num_local_experts": 8, "intermediate_size": 192}
    return _save(transformers.MixtralConfig(**_SHAPE | _EXPERTS | special | changes), folder, seed)


def tiny_qwen3_moe(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Qwen3-MoE: 4 of 16 narrow experts by softmax, weights renormalised; the first layer is dense."""
    special = {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "mlp_only_layers": [0]}
    return _save(transformers.Qwen3MoeConfig(**_SHAPE | _EXPERTS | special | changes), folder, seed)


def tiny_glm4_moe(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """GLM-4.5: DeepSeek-V3's experts without its attention.

    Sigmoid scores, groups, a bias for the choice, a scale, a shared expert; the first layer is dense.
    """
    special = {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    }
    return _save(transformers.Glm4MoeConfig(**_SHAPE | _EXPERTS | special | changes), folder, seed, _bias_choice)


def tiny_gpt_oss(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """gpt-oss: experts with biases and gates between their ups, attention sinks, a window in every other layer."""
    special = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": _MAX_TOKENS // 4,
        },
        "tie_word_embeddings": False,
    }
    return _save(transformers.GptOssConfig(**_SHAPE | special | changes), folder, seed, _roughen_expert_biases)


def tiny_mamba(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Mamba: no attention at all."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 128, "state_size": 16, "num_hidden_layers": 3}
    return _save(transformers.MambaConfig(**_TOKENS | shape | _STATES | changes), folder, seed, _widen_states)


def tiny_granite_hybrid(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Granite 4: Mamba-2 in three layers of four, attention without positions in one; dense."""
    special = {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_chunk_size": 32,
        "head_dim": 32,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "position_embedding_type": "nope",
        "tie_word_embeddings": False,
    }
    return _save(transformers.GraniteMoeHybridConfig(**_SHAPE | special | changes), folder, seed, _widen_states)


def tiny_jamba(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Jamba: Mamba with norms of its own, attention without positions in one layer of two, experts in one of two."""
    special = {
        "head_dim": 32,  # what vLLM computes from the others
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": 16,
        "tie_word_embeddings": False,
    }
    return _save(transformers.JambaConfig(**_SHAPE | special | changes), folder, seed, _widen_states)


def tiny_falcon_h1(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Falcon-H1: attention and Mamba-2 beside each other in each layer, with multipliers."""
    special = {
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_chunk_size": 32,
        "key_multiplier": 0.7,
        "ssm_out_multiplier": 0.8,
        "attention_out_multiplier": 0.9,
        "tie_word_embeddings": False,
    }
    return _save(transformers.FalconH1Config(**_SHAPE | special | changes), folder, seed, _widen_states)


def tiny_zamba2(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Zamba 2: Mamba-2, and in one layer of two a transformer that all of these share, with adapters of their own."""
    special = {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 1,
        "mamba_ngroups": 1,
        "mamba_d_state": 32,
        "mamba_expand": 2,
        "n_mamba_heads": 8,
        "chunk_size": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 64,
        "adapter_rank": 16,
        "tie_word_embeddings": True,
    }
    return _save(transformers.Zamba2Config(**_SHAPE | special | changes), folder, seed, _widen_states)


def tiny_nemotron_h(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Nemotron-H: Mamba-2 in two groups, attention without positions, layers of an MLP alone."""
    special = {
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 32,
        "chunk_size": 32,
        "head_dim": 32,
        "sliding_window": None,  # vLLM has a window where this is set, transformers never
        "time_step_min": 1e-9,  # transformers lengthens what is less, vLLM does not
        "tie_word_embeddings": False,
    }
    return _save(transformers.NemotronHConfig(**_SHAPE | special | changes), folder, seed, _widen_states)


def tiny_lfm2(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """LFM2: gated short convolutions, with attention in one layer of four."""
    special = {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "head_dim": 32,
        "conv_L_cache": 3,
        "conv_dim": 256,
        "block_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "tie_word_embeddings": True,
    }
    return _save(transformers.Lfm2Config(**_SHAPE | special | changes), folder, seed)


def tiny_qwen3_next(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Qwen3-Next: gated delta nets, gated attention in one layer of four, experts with a shared one."""
    special = {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 48,
        "num_experts": 8,
        "shared_expert_intermediate_size": 128,
    }
    return _save(transformers.Qwen3NextConfig(**_SHAPE | _EXPERTS | special | changes), folder, seed, _widen_states)


def tiny_olmo_hybrid(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """OLMo Hybrid: gated delta nets, and attention without positions in one layer of four."""
    special = {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_key_value_heads": _SHAPE["num_attention_heads"],
        "head_dim": _SHAPE["hidden_size"] // _SHAPE["num_attention_heads"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    config = transformers.OlmoHybridConfig(**_SHAPE | special | changes)
    # transformers writes the names of its own next checkpoints, vLLM reads those of the published ones
    names = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    return _rename(_save(config, folder, seed, _widen_states), names)


def tiny_kimi_linear(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Kimi Linear: delta attention by channels, latent attention without positions in one layer of four, experts."""
    kinds = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 4, "head_dim": 32}
    special = {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "linear_attn_config": kinds | {"short_conv_kernel_size": 4},
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "num_key_value_heads": _SHAPE["num_attention_heads"],
        "mla_use_nope": True,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 64,
    }
    config = transformers.KimiLinearConfig(**_SHAPE | special | changes)
    config.architectures = ["KimiLinearForCausalLM"]
    # transformers calls the dense layer's part a mixture, too
    return _rename(_save(config, folder, seed, _widen_states), {"layers.0.block_sparse_moe": "layers.0.mlp"})


RECURRENT: dict[str, Callable[..., Path]] = {
    "mamba": tiny_mamba,
    "granite_hybrid": tiny_granite_hybrid,
    "lfm2": tiny_lfm2,
    "qwen3_next": tiny_qwen3_next,
}
"""Models whose layers, or some of them, keep a state of fixed size."""

BY_TRITON: dict[str, Callable[..., Path]] = {"olmo_hybrid": tiny_olmo_hybrid, "kimi_linear": tiny_kimi_linear}
"""Models whose layers run vLLM's own Triton kernels, on npu too."""

MIXTURES: dict[str, Callable[..., Path]] = {
    "mixtral": tiny_mixtral,
    "qwen3_moe": tiny_qwen3_moe,
    "glm4_moe": tiny_glm4_moe,
    "gpt_oss": tiny_gpt_oss,
}

ENCODERS: dict[str, Callable[..., Path]] = {"bert": tiny_bert, "modernbert": tiny_modernbert}


def prompt_token_ids(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    """Return one random prompt of each length, in tokens, without the special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def with_tokenizer(folder: Path) -> Path:
    """Add a tokenizer whose words are w0, w1 and so on, for what asks for one: pooling tasks, grammars."""
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0")
    tokenizer.save_pretrained(folder)
    return folder


def _save(
    config: transformers.PreTrainedConfig,
    folder: Path,
    seed: int,
    adjust: Callable[[Any], None] | None = None,
) -> Path:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        roughen_vectors(model)
        if adjust is not None:
            adjust(model)
    model.save_pretrained(folder)
    return folder


def _rename(folder: Path, names: dict[str, str]) -> Path:
    """Rename weights of a checkpoint by parts of their names."""
    place = folder / "model.safetensors"
    weights = safetensors.torch.load_file(place)
    for old, new in names.items():
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    safetensors.torch.save_file(weights, place, {"format": "pt"})
    return folder


def _save_encoder(config: transformers.PreTrainedConfig, folder: Path, seed: int, **options: Any) -> Path:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.AutoModel.from_config(config, dtype=torch.float32, **options)
        roughen_vectors(model)
    model.save_pretrained(folder)
    return with_tokenizer(folder)  # vLLM's pooling tasks ask for one, even where prompts are ids


def roughen_vectors(model: torch.nn.Module) -> None:
    """Move norm weights and biases off their neutral start, where a missing one would go unnoticed."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


def _bias_choice(model: Any) -> None:
    """Give the experts' choice a bias that changes it."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)


def _roughen_expert_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):
            parameter.normal_(std=0.2)


def _widen_states(model: Any) -> None:
    """Let the states be heard: wide convolutions, and step sizes of about one."""
    for name, parameter in model.named_parameters():
        if "conv1d.weight" in name:
            parameter.normal_(std=0.4)
        elif name.endswith("dt_bias"):
            parameter.normal_(mean=-1.0, std=0.5)


def _calm_embeddings(model: Any, factor: float = 8.0) -> None:
    """Shrink a Gemma's embeddings and let its final norm make up for it.

    Gemma multiplies tied embeddings by sqrt(hidden): with random ones the model only repeats its last token, whatever
    attention says. A Gemma norm multiplies by (1 + weight).
    """
    model.model.embed_tokens.weight.div_(factor)
    model.model.norm.weight.add_(1).mul_(factor).sub_(1)
