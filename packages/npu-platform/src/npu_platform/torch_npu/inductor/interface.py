"""Owns what Dynamo and Inductor ask of a device by its type: devices, streams, properties."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

npu: Any = torch.get_device_module("npu")


class NpuInterface(DeviceInterface):
    """The functions of ``torch.npu`` under the names that Dynamo and Inductor call them by."""

    device = npu.device  # type: ignore[assignment]
    Event = npu.Event
    Stream = npu.Stream

    current_device = staticmethod(npu.current_device)
    set_device = staticmethod(npu.set_device)
    device_count = staticmethod(npu.device_count)
    is_available = staticmethod(npu.is_available)
    current_stream = staticmethod(npu.current_stream)
    set_stream = staticmethod(npu.set_stream)
    stream = staticmethod(npu.stream)
    synchronize = staticmethod(npu.synchronize)
    memory_allocated = staticmethod(npu.memory_allocated)

    class Worker:
        """The same in a process that compiles; the device comes up in any process at first use."""

        set_device = staticmethod(npu.set_device)
        current_device = staticmethod(npu.current_device)
        get_device_properties = staticmethod(npu.get_device_properties)

    @staticmethod
    def exchange_device(device: int) -> int:
        """Make ``device`` current and return the one that was."""
        previous = npu.current_device()
        npu.set_device(device)
        return previous

    maybe_exchange_device = exchange_device

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        """Return the id of the current stream."""
        return npu.current_stream(device_idx).stream_id

    @staticmethod
    def get_compute_capability(device: torch.types.Device = None) -> str:
        """Return the empty string: what is generated depends on the host's instructions, as for the CPU."""
        del device
        return ""

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        """Return True."""
        del including_emulation
        return True


def register_interface() -> None:
    """Register the interface with Dynamo, for ``npu`` and for each device by number."""
    register_interface_for_device("npu", NpuInterface)
    for index in range(npu.device_count()):
        register_interface_for_device(f"npu:{index}", NpuInterface)
