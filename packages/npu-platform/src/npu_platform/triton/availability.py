"""Whether Triton kernels can run here: the device is there, and so is a compiler."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys

from npu_platform import config
from npu_platform.triton import build

_NO_COMPILER = (
    "there is no C++ compiler (apt install g++, or name one in CXX), and no cache of kernels that `npu warm` has "
    "filled for this processor"
)


def is_active() -> bool:
    """Say whether this is the driver for Triton, or for vLLM, which asks by the same function when it is imported.

    vLLM takes Triton kernels in many places once it has a driver. The V1 runner needs none of them here, since all that
    it launches has a body of its own, and a process would wait for the compiler at its start. So for vLLM it is active
    where a variable asks for it: ``VLLM_USE_V2_MODEL_RUNNER=1``, or Triton's own ``TRITON_DEFAULT_BACKEND=npu``, which
    leaves the runner to :mod:`npu_platform.runners`.
    """
    if not _asked_by_vllm():
        return _has_device() and _has_kernels()
    return config.triton_for_vllm() and _is_platform() and _has_kernels()


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
        return 'Triton is not installed (pip install "npu-platform[triton]")'
    return None if build.is_ready() else _NO_COMPILER


def _asked_by_vllm() -> bool:
    """Say whether ``vllm.triton_utils.importing`` asks: it has no other way to be told. Versions: vLLM 0.32."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("npu_platform.triton"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__") == "vllm.triton_utils.importing"
