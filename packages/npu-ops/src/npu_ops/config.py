"""Owns what may be configured: the one place that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from npu_ops.errors import ConfigError


@dataclass(frozen=True)
class OpsConfig:
    """Settings of npu-ops.

    isa: the kernels' instruction set, one of native.isas(); None: the best that the machine has (NPU_ISA).
    batch_invariant: a row's result has the same bits whatever shares its batch (vLLM's VLLM_BATCH_INVARIANT).
    tune: linear layers are measured against torch's when a model is loaded (NPU_TUNE).
    cache: directory of what was measured (vLLM's VLLM_CACHE_ROOT).
    head_bits: of the weights that give the logits, 16 (as the checkpoint has them) or 8 (NPU_HEAD_BITS).
    """

    isa: str | None = None
    batch_invariant: bool = False
    tune: bool = True
    cache: Path = Path.home() / ".cache" / "vllm"
    head_bits: int = 16

    @classmethod
    def from_environment(cls) -> OpsConfig:
        """Read the variables above; raises ConfigError on what they cannot be. native.load looks at the isa."""
        isa = os.environ.get("NPU_ISA") or None
        invariant = _flag("VLLM_BATCH_INVARIANT", default="0")
        tune = _flag("NPU_TUNE", default="1")
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = Path(os.environ.get("VLLM_CACHE_ROOT") or caches / "vllm").expanduser()
        return cls(isa, invariant, tune, cache, _head_bits())


def _flag(name: str, default: str) -> bool:
    value = os.environ.get(name) or default
    if value not in ("0", "1"):
        msg = f"{name} must be 0 or 1, got {value!r}: correct it, or unset it."
        raise ConfigError(msg)
    return value == "1"


def _head_bits() -> int:
    value = os.environ.get("NPU_HEAD_BITS") or "16"
    if value not in ("8", "16"):
        msg = f"NPU_HEAD_BITS must be 8 or 16, got {value!r}: correct it, or unset it to keep the head as it is stored."
        raise ConfigError(msg)
    return int(value)
