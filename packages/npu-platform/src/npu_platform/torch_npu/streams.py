"""Owns streams and events: their order is real, and work is done when it is submitted."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from .devices import Device, current_device, index_of, set_device

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "get_stream_from_external",
    "set_stream",
    "stream",
]


class Stream(torch.Stream):
    """A stream of a device, made new or from the ids of another.

    Args:
        device: the device, by default the current one.
        priority: accepted for the signature's sake; streams are synchronous.
        ids: ``stream_id``, ``device_index`` and ``device_type`` of an existing stream.
    """

    def __new__(cls, device: Device = None, priority: int = 0, **ids: Any) -> Self:
        """Make a stream."""
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("npu", index_of(device)), priority=priority)

    @property
    def npu_stream(self) -> int:
        """The id that the driver knows the stream by."""
        return self.stream_id

    @property
    def priority(self) -> int:
        """Return 0: streams are synchronous, none goes before another."""
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority."""
        return (0, 0)


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "npu"


class Event(metaclass=_EventType):
    """Makes a ``torch.Event`` of the npu device.

    Not a subclass of it: ``elapsed_time`` of PyTorch takes only exact instances.

    Args:
        enable_timing: whether ``elapsed_time`` may be asked.
        blocking: accepted for the signature's sake.
        interprocess: accepted for the signature's sake.
    """

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_external: Any
    ) -> torch.Event:
        """Make an event."""
        return torch.Event(device="npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: Device = None) -> Stream:
    """Return this thread's current stream of a device."""
    return _as_npu(torch.accelerator.current_stream(index_of(device)))


def default_stream(device: Device = None) -> Stream:
    """Return the default stream of a device."""
    current = torch.accelerator.current_stream(index_of(device))
    return Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def get_stream_from_external(data_ptr: int, device: Device = None) -> Stream:
    """Return the stream that the driver knows as ``data_ptr``: a ``Stream.npu_stream`` handed through other code."""
    index = index_of(device)
    return Stream(stream_id=data_ptr, device_index=index, device_type=default_stream(index).device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make ``stream`` this thread's current stream; None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager that makes a stream, and its device, current; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._previous: torch.Stream | None = None
        self._device = -1

    def __enter__(self) -> None:
        """Make the stream current."""
        if self.stream is not None:
            self._device = current_device()
            self._previous = torch.accelerator.current_stream(self.stream.device_index)
            torch.accelerator.set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the previous stream and device current again."""
        if self._previous is not None:
            torch.accelerator.set_stream(self._previous)
            set_device(self._device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return the context manager that makes ``stream`` current."""
    return StreamContext(stream)


def _as_npu(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
