"""Owns how the device enters PyTorch: whether it may, the library, the name ``npu``, the module ``torch.npu``."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from functools import cache
from pathlib import Path

import torch

from npu_platform import config
from npu_platform.errors import ConfigurationError

NAME = "npu"


def register() -> None:
    """Register the device, once. Does nothing where :func:`inactive_reason` gives a reason."""
    if inactive_reason() is not None or hasattr(torch, NAME):
        return
    torch.utils.rename_privateuse1_backend(NAME)
    _define_vllm_ops()
    package = sys.modules[__package__]
    torch._register_device_module(NAME, package)
    for theme in ("amp", "devices", "distributed", "faults", "graphs", "memory", "profiler", "random", "streams"):
        sys.modules[f"torch.{NAME}.{theme}"] = importlib.import_module(f".{theme}", __package__)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    importlib.import_module(".distributed", __package__).register_backend()
    importlib.import_module(".sharing", __package__).register_reducer()
    importlib.import_module(".fake_convolutions", __package__).register()
    importlib.import_module(".exits", __package__).register()


@cache
def inactive_reason() -> str | None:
    """Return why the software NPU is not registered in this process, or None when it is (or will be).

    ``NPU_DEVICE=off`` keeps it out and the name of a driver lets it in beside other accelerators; otherwise it
    stays out where an accelerator is present, since a registered device of its kind would replace it in
    ``torch.accelerator``.
    """
    try:
        choice = config.device_choice()
    except ConfigurationError as error:  # `import torch` must not fail; the platform and `npu doctor` say it
        return str(error)
    if choice == "off":
        return "NPU_DEVICE=off"
    other = torch._C._get_privateuse1_backend_name()
    if other not in ("privateuseone", NAME) or (other == NAME and not hasattr(torch, NAME)):
        return f"another backend has taken PyTorch's only slot for out-of-tree devices, as {other!r}"
    return _library_problem() or (_driver_problem() if config.is_forced(choice) else _accelerator_problem())


def _library_problem() -> str | None:
    """Return why ``npu_platform._C`` cannot be loaded beside this torch, or None; it is not loaded for that."""
    library = importlib.util.find_spec("npu_platform._C")
    note = Path(library.origin).with_name("built_for_torch") if library and library.origin else None
    built_for = note.read_text().strip() if note and note.is_file() else torch.__version__
    if built_for.split(".")[:2] == torch.__version__.split(".")[:2]:
        return None
    return (
        f"npu_platform._C is compiled for torch {built_for} and this is {torch.__version__}; "
        "reinstall npu-platform from its source with --no-build-isolation beside this torch"
    )


def _driver_problem() -> str | None:
    """Return why the driver of ``NPU_DEVICE`` cannot be had, or None."""
    from npu_platform import _C

    try:
        _C.driver_name()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def _accelerator_problem() -> str | None:
    """Return that there is another accelerator which this build of PyTorch can use here, or None."""
    for name in ("cuda", "xpu", "mps", "mtia"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return f"an accelerator of type {name!r} is present; NPU_DEVICE=simulator forces the software NPU"
    return None


def _define_vllm_ops() -> None:
    """Define ``torch.ops._C.weak_ref_tensor`` unless vLLM has a native library, which defines it itself when loaded."""
    from npu_platform import _C

    vllm = importlib.machinery.PathFinder.find_spec("vllm")
    folders = [] if vllm is None else [Path(folder) for folder in vllm.submodule_search_locations or ()]
    if not any(next(folder.glob("_C*.so"), None) for folder in folders):
        _C.define_weak_ref_tensor()
