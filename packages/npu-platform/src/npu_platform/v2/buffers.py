"""The V2 runner's small buffers, which the host writes and kernels read, in the place of vLLM's ``UvaBuffer``.

None of them sleeps: a request that ends while its engine sleeps has its numbers brought up to date by an empty step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_platform import capabilities
from npu_platform.host_views import device_view
from npu_platform.torch_npu.memory import outside_pools

__all__ = ["CopiedBuffer", "SharedBuffer", "of_device"]


class SharedBuffer:
    """Pinned memory, and a tensor of the device in it; vLLM writes another buffer while a step may read this one.

    Args:
        size: shape of both.
        dtype: of both.
    """

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=True)  # type: ignore[call-overload]
        self.np = self.cpu.numpy()
        self._device = device_view(self.cpu)

    def uva(self, n: int | None = None) -> torch.Tensor:
        """Return the device's tensor, or its first `n` rows."""
        return self._device if n is None else self._device[:n]


class CopiedBuffer:
    """Pinned memory, and a tensor of the device that follows it, for a device that does not read the host's memory.

    Args:
        size: shape of both.
        dtype: of both.
    """

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=True)  # type: ignore[call-overload]
        self.np = self.cpu.numpy()
        with outside_pools():
            self._device = torch.zeros(size, dtype=dtype, device="npu")  # type: ignore[call-overload]

    def uva(self, n: int | None = None) -> torch.Tensor:
        """Return the device's tensor, or its first `n` rows, with what the host has written."""
        if n is None:
            return self._device.copy_(self.cpu, non_blocking=True)
        return self._device[:n].copy_(self.cpu[:n], non_blocking=True)


def of_device() -> type[SharedBuffer | CopiedBuffer]:
    """Return the kind of buffer that suits the device that ``NPU_DEVICE`` chooses."""
    return SharedBuffer if capabilities.of_device().reads_host_memory else CopiedBuffer
