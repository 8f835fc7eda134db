"""Owns what may be configured: the one place that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from npu_ops.errors import ConfigError

ISAS = ("scalar", "avx2", "avx512")


@dataclass(frozen=True)
class OpsConfig:
    """Settings of npu-ops.

    isa: the kernels' instruction set, one of ISAS; None: the best that the machine has (NPU_ISA).
    batch_invariant: a row's result has the same bits whatever shares its batch (vLLM's VLLM_BATCH_INVARIANT).
    """

    isa: str | None = None
    batch_invariant: bool = False

    @classmethod
    def from_environment(cls) -> OpsConfig:
        """Read NPU_ISA and VLLM_BATCH_INVARIANT; raises ConfigError on what they cannot be."""
        isa = os.environ.get("NPU_ISA") or None
        if isa is not None and isa not in ISAS:
            names = ", ".join(ISAS)
            msg = f"NPU_ISA must be one of {names}, got {isa!r}: correct it, or unset it for the best of the machine."
            raise ConfigError(msg)
        invariant = os.environ.get("VLLM_BATCH_INVARIANT") or "0"
        if invariant not in ("0", "1"):
            msg = f"VLLM_BATCH_INVARIANT must be 0 or 1, got {invariant!r}: correct it, or unset it."
            raise ConfigError(msg)
        return cls(isa, invariant == "1")
