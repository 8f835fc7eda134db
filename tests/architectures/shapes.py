"""How a configuration of any architecture is made small: numbers for the fields it has, and what some need besides.

A number is given to a field that the class has, under its own name or one that it maps; what it has besides keeps its
default. Small means some hundred thousand weights, in shapes that no two dimensions share by chance.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["tiny_config"]

# Tokens that every model has; none of them ends an answer, since requests ignore the end.
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_LANGUAGE: dict[str, Any] = _TOKENS | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "ffn_dim": 256,
    "n_inner": 256,
    "num_hidden_layers": 4,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "word_embed_proj_dim": 128,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 512,
    "initializer_range": 0.1,
    "query_pre_attn_scalar": 32,
    # windows that end inside a block
    "sliding_window": 40,
    "attention_chunk_size": 64,
    "max_window_layers": 2,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "expert_ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    # latent attention
    "q_lora_rank": 96,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 48,
    # states
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 8,
    "n_mamba_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "mamba_d_head": 32,
    "mamba_chunk_size": 32,
    "chunk_size": 32,
    "n_groups": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # embeddings of layers
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 16,
}
_SEEING: dict[str, Any] = {
    "hidden_size": 64,
    "embed_dim": 64,
    "out_hidden_size": 128,
    "projection_dim": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_heads": 4,
    "head_dim": 16,
    "patch_size": 14,
    "image_size": 56,
    "num_position_embeddings": 16,
    "initializer_range": 0.1,
}
_HEARING: dict[str, Any] = {
    "d_model": 64,
    "hidden_size": 64,
    "hidden_dim": 64,
    "intermediate_size": 128,
    "encoder_layers": 2,
    "num_layers": 2,
    "num_hidden_layers": 2,
    "encoder_attention_heads": 4,
    "num_attention_heads": 4,
    "num_heads": 4,
    "encoder_ffn_dim": 128,
    "output_dim": 128,
}
_BY_PART = {"vision": _SEEING, "audio": _HEARING, "vq": _SEEING}

_MIXED = ["sliding_attention", "full_attention"] * 2
_THREE_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
_PARTLY_ROTATED = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    }
}
_WITHOUT_SPEECH = {"enable_audio_output": False}
# What numbers alone do not say.
_SPECIAL: dict[str, dict[str, Any]] = {
    "AfmoeConfig": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "AXK1Config": {"first_k_dense_replace": 0, "topk_method": "noaux_tc"},
    "DeepseekV2Config": {"n_group": 1},
    "DeepseekV3Config": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "Ernie4_5_MoeConfig": {"moe_layer_end_index": 3},
    "Glm4MoeConfig": {"head_dim": 32},
    "GteConfig": {"position_embedding_type": "rope"},
    "XLMRobertaConfig": {"position_embedding_type": "absolute"},
    "Qwen3VLMoeTextConfig": {"norm_topk_prob": True, "moe_intermediate_size": 48},  # no matrix of an expert is square
    # as published
    "HYV3Config": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    "Glm4MoeLiteConfig": {"first_k_dense_replace": 1},
    "Cohere2Config": {"logit_scale": 1.0},  # which transformers leaves out of Cohere 2 Vision
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [0, 0, 16]}
        }
    },
    "CohereCompassVisionConfig": {"deepstack_visual_indexes": [0, 1]},
    "CohereCompassConfig": {"tie_word_embeddings": True},
    "Cosmos3EdgeTextConfig": _THREE_POSITIONS,
    "Emu3Config": {"vocabulary_map": {"<image>": 500}},
    "Emu3VQVAEConfig": {"base_channels": 32, "codebook_size": 64},
    "Ernie4_5_VLMoeTextConfig": _THREE_POSITIONS | {"moe_intermediate_size": [64, 64]},
    "Granite4VisionConfig": {
        "deepstack_layer_map": [[0, 1]],
        "spatial_target_layers": [0, 1, 2, 3],
        "downsample_rate": "1/2",
    },
    "Qwen3OmniMoeVisionEncoderConfig": {"image_size": 56, "apply_vit_abs_pos_embed": True},  # as published
    "RadioConfig": {"video_temporal_patch_size": 2},
    "Qwen2_5OmniTextConfig": _THREE_POSITIONS | {"tie_word_embeddings": False},
    "Qwen3OmniMoeTextConfig": _THREE_POSITIONS | {"tie_word_embeddings": False, "sliding_window": None},  # as published
    "Qwen2_5OmniConfig": _WITHOUT_SPEECH,
    "Qwen3OmniMoeConfig": _WITHOUT_SPEECH,
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 4, "depths": [1] * 7},
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "MuseGlimmerVisionConfig": {"output_dim": 256},
    "Gemma3nTextConfig": {"layer_types": _MIXED, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "Gemma3TextConfig": {"layer_types": _MIXED},
    "Gemma4TextConfig": {"layer_types": _MIXED, "num_experts": None, "top_k_experts": None},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2Config": {
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_dim": 128,
        "block_dim": 128,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
    "LongcatFlashConfig": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "MiniMaxM2Config": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},  # as published
    "Llama4TextConfig": {"num_experts_per_tok": 1, "no_rope_layer_interval": 2},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_groups": 1},
    "Mamba2Config": {"n_groups": 1, "num_heads": 8, "head_dim": 32, "time_step_limit": (0.0, float("inf"))},
    "NemotronHConfig": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "sliding_window": None,  # vLLM has a window where this is set, transformers never
        "time_step_min": 1e-9,  # transformers lengthens what is less, vLLM does not
    },
    **dict.fromkeys(("Qwen2VLTextConfig", "Qwen2_5_VLTextConfig", "PaddleOCRTextConfig"), _THREE_POSITIONS),
    # transformers' attention has these biases whatever the field, which it has not; vLLM asks the published one
    "Glm4vTextConfig": _PARTLY_ROTATED | {"attention_bias": True},
    "GlmOcrTextConfig": _PARTLY_ROTATED,
    "Glm4vMoeTextConfig": _PARTLY_ROTATED | {"head_dim": 32, "use_qk_norm": False},
    "Zamba2Config": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_ngroups": 1,
        "attention_head_dim": 64,
        "num_key_value_heads": 4,
    },
}
_OF_ANY_KIND: dict[str, dict[str, Any]] = {
    "DiffusionGemmaConfig": {"vision_config": transformers.Gemma4VisionConfig},
    "Granite4VisionConfig": {"text_config": transformers.Granite4VisionTextConfig},
}
"""Parts that may be of several kinds: those of the published models, where others are the default."""
_SPEAKING = ("talker", "token2wav", "code2wav")  # parts that vLLM does not run
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")


def tiny_config(architecture: str) -> transformers.PreTrainedConfig:
    """Return a small configuration for a class of transformers' models.

    Raises whatever transformers raises where its configuration is not made of such fields.
    """
    config = _tiny(getattr(transformers, architecture).config_class, _LANGUAGE)
    config.architectures = [architecture]
    return config


def _tiny(cls: type[transformers.PreTrainedConfig], shape: dict[str, Any]) -> transformers.PreTrainedConfig:
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    wanted = dict(shape)
    if shape is _LANGUAGE and all(name in fields for name in _LATENT):  # heads have no keys of their own
        wanted |= {"num_key_value_heads": wanted["num_attention_heads"], "head_dim": wanted["qk_rope_head_dim"]}
    numbers = {cls.attribute_map.get(name, name): value for name, value in wanted.items()}
    taken = {name: value for name, value in numbers.items() if name in fields and _is_number(fields[name])}
    return cls(**taken | _parts(cls) | _SPECIAL.get(cls.__name__, {}))


def _parts(cls: type[transformers.PreTrainedConfig]) -> dict[str, Any]:
    """Return small configurations of the towers and the language model that a configuration consists of."""
    if not cls.sub_configs:
        return {}
    whole, parts = cls(), {}
    for name in cls.sub_configs:
        if name.startswith(_SPEAKING):
            continue
        kind = _OF_ANY_KIND.get(cls.__name__, {}).get(name)
        part = kind() if kind else getattr(whole, name, None)
        if part is None and name == "vision_config" and cls.sub_configs[name] is not transformers.AutoConfig:
            part = cls.sub_configs[name]()
        if isinstance(part, transformers.PreTrainedConfig):
            shape = next((each for word, each in _BY_PART.items() if name.startswith(word)), _LANGUAGE)
            parts[name] = _tiny(type(part), shape)
            if shape is _LANGUAGE and part.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # as published ones have it
                parts[name].architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[part.model_type]]
    return parts


def _is_number(default: object) -> bool:
    """Say whether a field holds a number, by its default, or may: lists and flags of the same name are another thing."""
    return default is None or default is dataclasses.MISSING or type(default) in (int, float)
