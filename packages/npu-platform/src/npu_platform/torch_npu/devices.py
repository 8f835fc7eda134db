"""Owns the devices of this process: how many there are, which one is current, what they are."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from npu_platform import _C

if TYPE_CHECKING:
    from typing import Self

Device = torch.device | int | str | None

__all__ = [
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_amp_supported_dtype",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_num_threads",
    "init",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_tf32_supported",
    "set_device",
    "set_num_threads",
    "synchronize",
]


def is_available() -> bool:
    """Return whether a device is visible; a bad environment variable is a warning here and an error at first use."""
    try:
        return _C.device_count() > 0
    except RuntimeError as error:
        warnings.warn(str(error), stacklevel=2)
        return False


def device_count() -> int:
    """Return the number of visible devices.

    Raises:
        RuntimeError: an ``NPU_*`` variable has a value that cannot be used.
    """
    return _C.device_count()


def current_device() -> int:
    """Return the index of this thread's current device."""
    return _C.current_device()


def set_device(device: Device) -> None:
    """Make ``device`` this thread's current device; a negative index changes nothing."""
    index = index_of(device)
    if index >= 0:
        _C.set_device(index)


def synchronize(device: Device = None) -> None:
    """Wait for all work of the device; refused while a graph is captured."""
    torch.accelerator.synchronize(index_of(device))


def get_device_name(device: Device = None) -> str:
    """Return the name that the driver gives the device: ``"Software NPU"`` on the simulator."""
    check_device(device)
    return _C.device_name()


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Return the version of the hardware, as major and minor."""
    check_device(device)
    return _C.device_version()


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is. ``total_memory`` is in bytes; ``multi_processor_count`` is the size of its thread pool.

    ``driver`` is the implementation of npu_driver.h that is behind it, and ``computes`` whether its kernels run.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int
    driver: str
    computes: bool


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Return the properties of a device."""
    _free, total = torch.accelerator.get_memory_info(index_of(device))
    major, minor = _C.device_version()
    return DeviceProperties(_C.device_name(), total, _C.num_threads(), major, minor, _C.driver_name(), _C.computes())


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Return whether one device can read another's memory: all lie in the memory of one host."""
    check_device(device)
    check_device(peer_device)
    return index_of(device) != index_of(peer_device)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: every dtype of PyTorch's CPU kernels is supported."""
    del including_emulation
    return True


def is_tf32_supported() -> bool:
    """Return False: float32 is computed in float32."""
    return False


def get_arch_list() -> list[str]:
    """Return an empty list: kernels choose by the host's instructions at run time, not by what they were built for."""
    return []


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast may use."""
    return [torch.bfloat16, torch.float16]


def init() -> None:
    """Bring the devices up now rather than at first use."""
    _C.device_count()


def is_initialized() -> bool:
    """Return whether the devices are up; they come up by themselves at first use, in forked processes too."""
    return _C.is_initialized()


def _is_in_bad_fork() -> bool:
    """Return False: a forked process goes on with a copy of its parent's devices."""
    return False


def get_num_threads() -> int:
    """Return the number of host threads that are the device's cores, the calling thread included."""
    return _C.num_threads()


def set_num_threads(threads: int) -> None:
    """Set the number of host threads that are the device's cores.

    Raises:
        RuntimeError: ``threads`` is less than one.
    """
    _C.set_num_threads(threads)


def ipc_collect() -> None:
    """Do nothing: device memory is not shared between processes."""


class device:  # noqa: N801 - the name in torch.cuda
    """Context manager that changes this thread's current device."""

    def __init__(self, device: Device) -> None:
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> Self:
        """Make the device current."""
        self.prev_idx = _C.current_device()
        if self.idx >= 0:
            _C.set_device(self.idx)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the previous device current again."""
        _C.set_device(self.prev_idx)


class device_of(device):  # noqa: N801 - the name in torch.cuda
    """Context manager that makes the device of a tensor current; does nothing for tensors elsewhere."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == "npu" else -1)


def index_of(device: Device) -> int:
    """Return the index that ``device`` means: None and ``"npu"`` mean the current device.

    Raises:
        ValueError: ``device`` is of another type.
    """
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "npu":
        msg = f"expected an npu device, got {device}; pass an index, 'npu' or 'npu:<index>'"
        raise ValueError(msg)
    return _C.current_device() if device.index is None else device.index


def check_device(device: Device) -> None:
    """Do nothing for the current device and for the first, of which a question must not bring the devices up.

    Raises:
        RuntimeError: there is no such device.
        ValueError: ``device`` is of another type.
    """
    index = index_of(device)
    if index not in (0, _C.current_device()):
        _C.check_device(index)
