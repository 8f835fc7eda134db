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
        self._device = self._of_device()

    def uva(self, n: int | None = None) -> torch.Tensor:
        """Return the device's tensor, or its first `n` rows, with what the host has written."""
        return self._device if n is None else self._device[:n]

    def _of_device(self) -> torch.Tensor:
        return device_view(self.cpu)


class CopiedBuffer(SharedBuffer):
    """The same for a device that does not read the host's memory: its tensor follows when it is asked for."""

    def uva(self, n: int | None = None) -> torch.Tensor:
        """Return the device's tensor, or its first `n` rows, with what the host has written until now."""
        return super().uva(n).copy_(self.cpu if n is None else self.cpu[:n], non_blocking=True)

    def _of_device(self) -> torch.Tensor:
        with outside_pools():
            return torch.zeros_like(self.cpu, device="npu")


def of_device() -> type[SharedBuffer]:
    """Return the kind of buffer that suits the device that ``NPU_DEVICE`` chooses."""
    return SharedBuffer if capabilities.of_device().reads_host_memory else CopiedBuffer
