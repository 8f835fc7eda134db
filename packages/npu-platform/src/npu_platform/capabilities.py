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

__all__ = ["GROUP", "Capabilities", "of_device"]

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

    Raises ConfigurationError where its entry point is something else than a Capabilities.
    """
    name = _name_of_driver(config.device_choice())
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        found = point.load()
        if not isinstance(found, Capabilities):
            msg = (
                f"The entry point {name} of {GROUP} must be a npu_platform.capabilities.Capabilities, not "
                f"{type(found).__name__}: mend or remove {point.dist.name if point.dist else point.value}."
            )
            raise ConfigurationError(msg)
        return found
    return Capabilities()


def _name_of_driver(choice: str) -> str:
    return Path(choice).name.partition(".")[0].removeprefix("lib")
