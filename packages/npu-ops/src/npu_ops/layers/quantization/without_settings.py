"""What configurations of quantisation have in common: every dtype, and of ours that have no settings the rest."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

__all__ = ["ConfigWithoutSettings", "EveryDtype"]


class EveryDtype:
    """Goes before a configuration of vLLM's, which names the dtypes of GPUs' kernels."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Every dtype that the kernels take."""
        return [torch.bfloat16, torch.float16, torch.float32]


class ConfigWithoutSettings(EveryDtype, QuantizationConfig):
    """A method that runs on any processor in every dtype, and reads nothing of a checkpoint's configuration."""

    name: ClassVar[str]
    """By which it is registered."""

    @classmethod
    def get_name(cls) -> Any:
        """Return the method's name."""
        return cls.name

    @classmethod
    def get_min_capability(cls) -> int:
        """Any: capabilities are CUDA's."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: there are no settings."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the configuration."""
        return cls()
