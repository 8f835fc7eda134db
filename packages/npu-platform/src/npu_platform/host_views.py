"""Tensors of the device that lie in pinned memory of the host, which kernels read where it is (unified addressing).

A driver promises that host and device have the same addresses (npu_driver.h), but not that kernels reach memory of the
host: ``Capabilities.reads_host_memory`` says whether they do.
"""

from __future__ import annotations

import ctypes

import torch
from torch.utils import dlpack

__all__ = ["device_view"]

_EXTENSION = 12  # DLDeviceType kDLExtDev, for which PyTorch takes the device of a privateuse1 backend


class _Head(ctypes.Structure):
    """The first fields of a ``DLManagedTensor`` (dlpack.h)."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


def device_view(pinned: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the current device in the same memory, which lives as long as the view; `pinned` of the host.

    Raises ValueError for memory that is not pinned: the device may not read it while it is anywhere.
    """
    if not pinned.numel():
        return torch.empty_strided(pinned.size(), pinned.stride(), dtype=pinned.dtype, device="npu")
    if not pinned.is_pinned():
        msg = "npu reads pinned memory of the host only: call pin_memory() on the tensor first."
        raise ValueError(msg)
    storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(pinned.untyped_storage())
    capsule = dlpack.to_dlpack(storage)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    head = _Head.from_address(pointer(capsule, b"dltensor"))
    head.device_type, head.device_id = _EXTENSION, torch.npu.current_device()
    seen = dlpack.from_dlpack(capsule).view(pinned.dtype)
    return seen.as_strided(pinned.size(), pinned.stride(), pinned.storage_offset())
