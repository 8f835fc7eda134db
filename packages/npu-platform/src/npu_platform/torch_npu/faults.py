"""Owns faults on demand, ``torch.npu.faults``: what goes wrong on hardware, where it is told to, as often as one likes.

Each function arms one :class:`Fault`, which counts the events that match it from then on (allocations, kernel launches
or transfers, of all threads) and strikes at the ``at``-th, counted from 1::

    with torch.npu.faults.inject_out_of_memory(at=37) as fault:
        step()
    assert fault.struck == 1

Used without ``with``, a fault stays armed until :meth:`Fault.disarm` or :func:`clear`. The variable ``NPU_DEBUG`` arms
the same faults, by their text, when the devices of a process come up: ``NPU_DEBUG=oom@37,slow_link=200us``.

Errors are those of hardware: ``torch.OutOfMemoryError``, and ``torch.AcceleratorError`` (a ``RuntimeError``) for
kernels and lost devices, with a ``RuntimeError`` of the same words where a library of kernels stands between. The
contents of results are never changed, except by :func:`flip_bit` and :func:`reset_device`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from npu_platform import _C

from .devices import Device, index_of

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Fault",
    "clear",
    "fail_kernel",
    "flip_bit",
    "inject_out_of_memory",
    "lose_device",
    "reset_device",
    "slow_down",
    "slow_link",
]


class Fault:
    """An armed fault; as a context manager it is disarmed at the end of the block."""

    def __init__(self, text: str) -> None:
        """Arm the fault of that text, written as in ``NPU_DEBUG``.

        Raises:
            ValueError: the text is not a fault.
        """
        self._armed = _C.arm_fault(text)

    @property
    def text(self) -> str:
        """The fault as ``NPU_DEBUG`` would arm it, ``"oom@37"`` for one."""
        return self._armed.text

    @property
    def struck(self) -> int:
        """How often the fault has struck."""
        return self._armed.struck

    @property
    def history(self) -> list[str]:
        """What the fault did, a line each time: which launch or allocation, which bit. Delays leave no line."""
        return self._armed.history

    def disarm(self) -> None:
        """Let the fault strike no more; what it did can still be read."""
        _C.disarm_fault(self._armed)

    def __repr__(self) -> str:
        """Return the text and how often it has struck."""
        return f"Fault({self.text!r}, struck={self.struck})"

    def __enter__(self) -> Self:
        """Return the fault, which is armed already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disarm the fault."""
        self.disarm()


def inject_out_of_memory(at: int = 1, times: int = 1, device: Device = None) -> Fault:
    """Let allocations of device memory raise ``torch.OutOfMemoryError``, those inside kernels included.

    Args:
        at: the first allocation that fails.
        times: how many fail; 0: all that follow.
        device: the device whose allocations count; None: all devices.
    """
    return _arm("oom", at, times, device)


def fail_kernel(name: str | None = None, at: int = 1, times: int = 1, device: Device = None) -> Fault:
    """Let kernels raise ``torch.AcceleratorError`` instead of running; the device goes on.

    Args:
        name: launches of this kernel alone, such as ``"npu_ops::linear"``; ``"aten::add"`` means ``"aten::add.Tensor"``
            too. Copies are ``"aten::_copy_from"``. None: any kernel.
        at: the first launch that fails.
        times: how many fail; 0: all that follow.
        device: the device whose launches count; None: all devices.
    """
    return _arm("kernel" if name is None else f"kernel={_checked_name(name)}", at, times, device)


def lose_device(device: Device = None, at: int | None = None) -> Fault | None:
    """Lose a device: launches, allocations and synchronization on it raise until :func:`reset_device`.

    Freeing tensors still works. Other devices go on.

    Args:
        device: the device; None: the current one.
        at: the launch on it at which it is lost; None: now, which returns no fault.
    """
    index = index_of(device)
    if at is None:
        _C.lose_device(index)
        return None
    return _arm("lost", at, 1, index)


def reset_device(device: Device = None) -> None:
    """Make a lost device work again. The contents of its memory are gone: tensors that are alive read as zero."""
    _C.reset_device(index_of(device))


def flip_bit(seed: int = 0, at: int = 1, name: str | None = None, times: int = 1, device: Device = None) -> Fault:
    """Flip one bit of what a kernel made, silently; :attr:`Fault.history` says which.

    The bit is one of the kernel's result; for kernels that come from other libraries and write in place, of the
    youngest tensor of the launching thread.

    Args:
        seed: chooses the bit: the same seed at the same launch flips the same one.
        at: the launch after which it flips.
        name: count launches of this kernel alone.
        times: after how many launches; 0: after all that follow.
        device: the device whose launches count; None: all devices.
    """
    kernel = "" if name is None else f":kernel={_checked_name(name)}"
    return _arm("bitflip", at, times, device, f"{kernel}:seed={_checked(seed, 'seed', 0)}")


def slow_down(seconds: float, name: str | None = None, device: Device = None) -> Fault:
    """Delay each launch by ``seconds``, or those of one kernel."""
    kernel = "" if name is None else f":kernel={_checked_name(name)}"
    return _arm(f"slow={_microseconds(seconds)}", 1, 0, device, kernel)


def slow_link(seconds: float, device: Device = None) -> Fault:
    """Delay each transfer by ``seconds``: copies to and from the host or another device, ``item()``, collectives."""
    return _arm(f"slow_link={_microseconds(seconds)}", 1, 0, device)


def clear() -> None:
    """Disarm all faults of this process, those of ``NPU_DEBUG`` too. A lost device stays lost."""
    _C.clear_faults()


def _arm(what: str, at: int, times: int, device: Device, options: str = "") -> Fault:
    text = f"{what}@{_checked(at, 'at', 1)}{options}"
    if times != 1:
        text += f":times={_checked(times, 'times', 0)}"
    if device is not None:
        text += f":device={_checked(index_of(device), 'device', 0, _C.device_count() - 1)}"
    return Fault(text)


def _checked(value: int, name: str, least: int, most: int | None = None) -> int:
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        msg = f"{name} must be a whole number {limit}, not {value!r}"
        raise ValueError(msg)
    return value


def _checked_name(name: str) -> str:
    if not name or set(name) & set("@,= "):
        msg = f"name must be that of a kernel, such as 'aten::mm', not {name!r}"
        raise ValueError(msg)
    return name


def _microseconds(seconds: float) -> str:
    if not 1e-6 <= seconds <= 3600:
        msg = f"seconds must be from 1e-6 to 3600, not {seconds!r}"
        raise ValueError(msg)
    return f"{seconds * 1e6:.3f}us"
