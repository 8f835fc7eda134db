"""Whether Triton kernels can run here: the device is there, and so is a compiler; and whether vLLM takes its own."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from pathlib import Path

from npu_platform import config
from npu_platform.activation import installed_version
from npu_platform.triton import build

__all__ = ["TRITON_RANGE", "for_vllm", "is_active", "missing", "why_not_for_vllm"]

TRITON_RANGE = ("3.5", "4")
"""The versions of Triton that vLLM takes unasked: at least the first, below the second; those of the extra."""
_DISTRIBUTIONS = ("triton", "pytorch-triton")
_NOT_INSTALLED = 'Triton is not installed (pip install "npu-platform[triton]")'
_NO_COMPILER = (
    "there is no C++ compiler (apt install g++, or name one in CXX), and no cache of kernels that `npu warm` has "
    "filled for this processor"
)


def is_active() -> bool:
    """Say whether this is the driver for Triton, or for vLLM, which asks by the same function when it is imported.

    vLLM takes Triton kernels in many places once it has a driver, and its V2 runner is made of them. For vLLM it is
    active unless the user leaves Triton out or it could not run: :func:`for_vllm`. Which runner an engine has is
    chosen later, by :mod:`npu_platform.runners`.
    """
    if not _asked_by_vllm():
        return _has_device() and _has_kernels()
    return _is_platform() and for_vllm() and _has_kernels()


def for_vllm() -> bool:
    """Say whether vLLM is to take its Triton kernels, by its V2 runner or beside V1: asked for, or by default."""
    return why_not_for_vllm() is None


def why_not_for_vllm() -> str | None:
    """Return why vLLM is not to take its Triton kernels; None: it is.

    Where a variable asks for them they are to be taken, whatever is missing, which is then said; unasked only where
    nothing is: a start that could compile no kernel would be worse than one of the V1 runner, which needs none.
    """
    asked = config.asks_for_triton()
    if asked is not None:
        return None if asked else config.what_leaves_triton_out()
    if config.is_of_a_vendor(config.device_choice()):
        return "Triton kernels are compiled for the host, not for this device (TRITON_DEFAULT_BACKEND=npu runs them)"
    if (unfit := _unfit()) is not None:
        return unfit
    if config.cxx_compiler() is None:  # what a cache holds is of one configuration, and V1 needs none of it
        return "there is no C++ compiler for Triton kernels (apt install g++, or name one in CXX)"
    return _without_cache()


def _without_cache() -> str | None:
    """Return why kernels can be kept nowhere, as where a service has no home; None: they can, or another filled it.

    Where Triton keeps them is read as Triton does, which is not to be imported here.
    """
    known = os.path.expanduser("~")  # noqa: PTH111 - where no home is known it is a folder "~", as Triton has it
    home = Path(os.environ.get("TRITON_HOME") or known)
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    there = next(filter(os.path.exists, (folder, *folder.parents)), folder)
    filled = os.access(folder / build.OWN_FOLDER, os.R_OK)
    if filled or (there.is_dir() and os.access(there, os.W_OK)):
        return None
    return f"Triton's kernels cannot be kept in {folder} (name a folder that can be written in TRITON_CACHE_DIR)"


@functools.cache
def _unfit() -> str | None:
    """Return what is wrong with the package triton, with the way out; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return _NOT_INSTALLED
    low, high = TRITON_RANGE
    version = installed_version(*_DISTRIBUTIONS)
    if version is not None and _numbers(low) <= _numbers(version) < _numbers(high):
        return None
    return f'Triton {version} is not of the supported range >={low},<{high} (pip install "npu-platform[triton]")'


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 3.5.0+git1 gives (3, 5)."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


@functools.cache
def _has_device() -> bool:
    """Say whether this process has the device npu, which opens it."""
    try:
        import torch

        return hasattr(torch, "npu") and torch.npu.is_available()
    except Exception:  # noqa: BLE001 - `import triton` must not fail for what is wrong with the device
        return False


def _is_platform() -> bool:
    """Say whether npu is vLLM's platform, which opens no device: workers that are forked later choose theirs."""
    try:
        from npu_platform import activation

        return activation.decide().activate
    except Exception:  # noqa: BLE001 - nor must vLLM's import
        return False


@functools.cache
def _has_kernels() -> bool:
    """Say whether there is a C++ compiler, or what one has compiled; the log says so, once, if not."""
    if not build.is_ready():
        logging.getLogger("vllm.npu_platform.triton").warning("Triton kernels do not run on npu: %s.", _NO_COMPILER)
        return False
    return True


def missing() -> str | None:
    """Return what is not there for Triton kernels, with the way to get it; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return _NOT_INSTALLED
    return _without_cache() if build.is_ready() else _NO_COMPILER


def _asked_by_vllm() -> bool:
    """Say whether ``vllm.triton_utils.importing`` asks: it has no other way to be told. Versions: vLLM 0.32."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("npu_platform.triton"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__") == "vllm.triton_utils.importing"
