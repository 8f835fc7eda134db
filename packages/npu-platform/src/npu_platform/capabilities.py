"""What the device can do, as its vendor's package says; without one, what the software NPU can.

A package says it by an entry point of the group ``npu_platform.capabilities``, named as the driver's library
(``libvendor.so``: ``vendor``), whose object is a :class:`Capabilities`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

import torch

from npu_platform import config
from npu_platform.errors import ConfigurationError

__all__ = ["GROUP", "Capabilities", "of_device", "package_of_device"]

GROUP = "npu_platform.capabilities"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The limits of a device; the defaults are the software NPU's."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    """What models may be computed in; the first is what the way out names."""
    graphs: bool = True
    """Whether steps may be captured and replayed."""
    needs_compilation: bool = False
    """Whether models run in vLLM's compiled mode only."""
    reads_host_memory: bool = True
    """Whether kernels use pinned memory of the host where it is: the V2 runner's buffers, offloaded weights."""

    communicator: str = "npu_platform.distributed.communicator.NPUCommunicator"
    """The class that does the collectives of vLLM's parallel groups."""

    def no_dtype(self, dtype: torch.dtype) -> str | None:
        """Return the sentence that refuses a dtype, or None where the device computes in it."""
        if dtype in self.dtypes:
            return None
        known = [str(each).removeprefix("torch.") for each in self.dtypes]
        names = " and ".join(filter(None, (", ".join(known[:-1]), known[-1])))
        return f"This device computes in {names}, not in {str(dtype).removeprefix('torch.')}: pass --dtype {known[0]}."


@functools.cache
def of_device() -> Capabilities:
    """Return what the device that ``NPU_DEVICE`` chooses can do; it is not opened.

    Raises ConfigurationError where its entry point is something else than a Capabilities, or one of two.
    """
    point = _entry_point()
    if point is None:
        return Capabilities()
    found = point.load()
    if not isinstance(found, Capabilities):
        msg = (
            f"The entry point {point.name} of {GROUP} must be a npu_platform.capabilities.Capabilities, not "
            f"{type(found).__name__}: mend or remove {_package(point)}."
        )
        raise ConfigurationError(msg)
    return found


def package_of_device() -> str | None:
    """Return which package says what the device can do, without loading it; None where none does.

    Raises ConfigurationError where there are two.
    """
    point = _entry_point()
    return None if point is None else _package(point)


def _entry_point() -> importlib.metadata.EntryPoint | None:
    name = _name_of_driver(config.device_choice())
    points = tuple(importlib.metadata.entry_points(group=GROUP, name=name))
    if len({point.value for point in points}) > 1:
        packages = " and ".join(map(_package, points))
        msg = (
            f"One package may say what the device of '{name}' can do ({GROUP}), not {packages}: uninstall one of them."
        )
        raise ConfigurationError(msg)
    return points[0] if points else None


def _package(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


def _name_of_driver(choice: str) -> str:
    return Path(choice).name.partition(".")[0].removeprefix("lib")
