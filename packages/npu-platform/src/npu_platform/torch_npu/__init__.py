"""The module ``torch.npu``: the software NPU as a PyTorch device, with the surface of ``torch.cuda``.

``import torch`` calls :func:`autoload` through the entry point group ``torch.backends``. Devices come up at their first
use, not before; a bad environment variable is reported there and never by the import.
"""

from __future__ import annotations

import importlib
from typing import Any


def autoload() -> None:
    """Register the device; called by ``import torch``, see :mod:`npu_platform.torch_npu.registration`."""
    from .registration import register

    register()


# Where this package is imported before torch, the next line calls autoload: it must be defined by then.
import torch as _torch  # noqa: E402, F401

from .registration import inactive_reason  # noqa: E402

__all__ = ["autoload", "inactive_reason"]

if inactive_reason() is None:
    from . import amp as amp
    from . import faults as faults
    from . import profiler as profiler
    from .devices import *  # noqa: F403
    from .devices import _is_in_bad_fork as _is_in_bad_fork
    from .distributed import *  # noqa: F403
    from .graphed_callables import *  # noqa: F403
    from .graphs import *  # noqa: F403
    from .host_memory import *  # noqa: F403
    from .launches import *  # noqa: F403
    from .memory import *  # noqa: F403
    from .random import *  # noqa: F403
    from .sensors import *  # noqa: F403
    from .sleeping_pools import *  # noqa: F403
    from .streams import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return what Inductor asks for when it first compiles, or what depends on whether the devices are up."""
    if name == "_initialized":  # torch.utils.checkpoint keeps the state of the generators where it is true
        return importlib.import_module(".devices", __name__).is_initialized()
    if name == "Scheduling":
        return importlib.import_module(".inductor", __name__).Scheduling
    if name == "default_generators":
        return importlib.import_module(".random", __name__).default_generators
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
