"""Owns the native library: loading it, choosing its instruction set, and joining it to the device."""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path

import torch

from npu_ops.config import OpsConfig
from npu_ops.errors import ConfigError
from npu_ops.op import OPS

logger = logging.getLogger("vllm.npu_ops")

_LIBRARY = Path(__file__).with_name("_C.so")


def available() -> bool:
    """Whether the native kernels are loaded; without them the references serve."""
    return hasattr(torch.ops.npu_ops, "_isa")


def load() -> None:
    """Load the native kernels and bind them to the npu device, if there is one with a launch table. Idempotent.

    Raises ConfigError when NPU_ISA asks for more than the machine has.
    """
    config = OpsConfig.from_environment()
    if not available():
        path = _find_library()
        if path is None:
            logger.warning("npu-ops was built without its native kernels; the slower plain-torch references serve.")
            return
        torch.ops.load_library(str(path))
    if config.isa is not None:
        set_isa(config.isa)
    if config.batch_invariant:
        set_batch_invariant(on=True)
    bind_device()


@functools.cache
def digest() -> str:
    """Return a digest of the kernels' library, which tells builds apart; empty without native kernels."""
    path = _find_library()
    if path is None:
        return ""
    with path.open("rb") as library:
        return hashlib.file_digest(library, "sha256").hexdigest()[:12]


def bind_device() -> bool:
    """Register the native kernels for npu tensors; False when the device exports no launch table."""
    if not available() or not hasattr(torch.ops.npu, "launch_table"):
        return False
    _warn_of_kernels_that_are_lost()
    torch.ops.npu_ops._bind_device(torch.ops.npu.launch_table())
    return True


def isas() -> tuple[str, ...]:
    """The instruction sets that this build has kernels for, the plainest first; none without native kernels."""
    return tuple(torch.ops.npu_ops._isas().split()) if available() else ()


def isa() -> str:
    """Instruction set of the kernels in use, one of isas()."""
    return torch.ops.npu_ops._isa()


def instructions(name: str) -> list[str]:
    """What a processor must have to run the kernels of instruction set `name`, as the compiler calls it."""
    return torch.ops.npu_ops._instructions_of_isa(name).split()


def reads_fp8_panels() -> bool:
    """Whether the kernels in use multiply rows of bfloat16 sooner by fp8 weights in panels than as they are stored."""
    asked = instructions(isa()) if available() else []
    return "avx512bf16" in asked and "amx_tile" not in asked


def highest_isa() -> str:
    """The best instruction set that this machine and this build have in common."""
    return torch.ops.npu_ops._highest_isa()


def product_isa() -> str:
    """Instruction set of products of many rows: isa(), or a lower one that was measured to be faster here."""
    return torch.ops.npu_ops._product_isa()


def can_run(name: str) -> bool:
    """Whether set_isa takes `name`: the machine has it, or this build emulates it (NPU_EMULATE_TIERS, for tests)."""
    return torch.ops.npu_ops._can_run_isa(name)


def is_emulated() -> bool:
    """Whether the kernels in use are of an instruction set that the machine lacks, in a build that emulates it."""
    return torch.ops.npu_ops._isa_is_emulated()


def set_isa(name: str) -> None:
    """Use the kernels of instruction set `name` from now on; raises ConfigError when the machine does not have it."""
    if name not in isas():
        names = ", ".join(isas())
        msg = f"NPU_ISA must be one of {names}, got {name!r}: correct it, or unset it for the best of the machine."
        raise ConfigError(msg)
    if not torch.ops.npu_ops._set_isa(name):
        best = highest_isa()
        msg = (
            f"instruction set {name!r} is not available: this machine goes up to {best!r}, choose that or a lower one."
        )
        raise ConfigError(msg)


def batch_invariant() -> bool:
    """Whether a row's result has the same bits whatever shares its batch."""
    return available() and torch.ops.npu_ops._batch_invariant()


def set_batch_invariant(*, on: bool) -> None:
    """Choose, from now on, one order of the sums for any number of rows; raises ConfigError without native kernels."""
    if not available():
        msg = "batch-invariant mode needs the native kernels, which this build of npu-ops lacks: rebuild it with them."
        raise ConfigError(msg)
    torch.ops.npu_ops._set_batch_invariant(on)


def _find_library() -> Path | None:
    """The library lies beside this file, or, in an editable install, where the build put it."""
    if _LIBRARY.exists():
        return _LIBRARY
    from importlib.metadata import PackageNotFoundError, files

    try:
        installed = files("npu-ops") or []
    except PackageNotFoundError:
        return None
    return next((Path(f.locate()) for f in installed if f.name == "_C.so"), None)


@functools.cache
def _warn_of_kernels_that_are_lost() -> None:
    """Name the kernels that somebody registered before ours, which take their place: the last one counts."""
    names = [name for name in OPS if torch._C._dispatch_has_kernel_for_dispatch_key(f"npu_ops::{name}", "PrivateUse1")]
    if names:
        msg = "Kernels for npu from before npu_ops was imported are lost: import npu_ops first, then register %s."
        logger.warning(msg, ", ".join(names))
