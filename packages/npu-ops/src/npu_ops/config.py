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
    """

    isa: str | None = None

    @classmethod
    def from_environment(cls) -> OpsConfig:
        """Read NPU_ISA; raises ConfigError when it names no instruction set."""
        isa = os.environ.get("NPU_ISA") or None
        if isa is not None and isa not in ISAS:
            names = ", ".join(ISAS)
            msg = f"NPU_ISA must be one of {names}, got {isa!r}: correct it, or unset it for the best of the machine."
            raise ConfigError(msg)
        return cls(isa)
