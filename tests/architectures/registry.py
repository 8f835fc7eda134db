"""Which architectures vLLM registers, by what they are for, and which of them transformers has code for."""

from __future__ import annotations

import transformers
from vllm.model_executor.models import registry

__all__ = ["KINDS", "has_code", "registered"]

KINDS = {
    "text": ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"),
    "embedding": ("_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS"),
    "classification": ("_SEQUENCE_CLASSIFICATION_MODELS", "_TOKEN_CLASSIFICATION_MODELS", "_REWARD_MODELS"),
    "multimodal": ("_MULTIMODAL_MODELS",),
}
"""What an architecture is for -> the names of vLLM's tables. Heads for drafts are no models and in none of them."""

_GENERATION_WITH_MEDIA = "ForConditionalGeneration"


def registered() -> dict[str, str]:
    """Return each architecture with the first kind that vLLM has it under."""
    found: dict[str, str] = {}
    for kind, tables in KINDS.items():
        for table in tables:
            for name in getattr(registry, table):
                found.setdefault(name, "multimodal" if name.endswith(_GENERATION_WITH_MEDIA) else kind)
    return found


def has_code(architecture: str) -> bool:
    """Say whether transformers can make a model of this architecture."""
    return hasattr(getattr(transformers, architecture, None), "config_class")
