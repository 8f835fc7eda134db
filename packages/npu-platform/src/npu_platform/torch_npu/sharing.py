"""Owns how npu tensors travel between processes: as copies, through shared memory or with a new process."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing.reductions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    _Layout = tuple[torch.Size, tuple[int, ...]]  # sizes and strides


def register_reducer() -> None:
    """Teach queues and pipes of ``torch.multiprocessing`` about npu tensors."""
    ForkingPickler.register(torch.Tensor, _reduce)
    ForkingPickler.register(torch.nn.parameter.Parameter, _reduce_parameter)


def _reduce(tensor: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if tensor.device.type != "npu":
        return torch.multiprocessing.reductions.reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        msg = "an npu tensor with a graph behind it cannot be sent to another process; send tensor.detach()"
        raise RuntimeError(msg)
    plain = tensor.detach().resolve_conj().resolve_neg()
    layout = (plain.shape, plain.stride())
    host = _span(plain).cpu()
    if get_spawning_popen() is not None:
        # An argument of a spawned process is read after this function: a descriptor of `host` would be closed by then.
        content = host.view(torch.uint8).numpy().tobytes()
        return _rebuild_from_bytes, (content, host.dtype, layout, tensor.device.index, tensor.requires_grad)
    return _rebuild, (host.share_memory_(), layout, tensor.device.index, tensor.requires_grad)


def _span(tensor: Tensor) -> Tensor:
    """Return the elements of the storage from the tensor's first to its last, of one dimension."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((steps + 1 if tensor.numel() else 0,), (1,))


def _reduce_parameter(parameter: torch.nn.Parameter) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if parameter.device.type != "npu":
        return torch.multiprocessing.reductions.reduce_tensor(parameter)
    return _rebuild_parameter, (parameter.detach(), parameter.requires_grad)


def _rebuild(span: Tensor, layout: _Layout, index: int, requires_grad: bool) -> Tensor:
    storage = span.to(torch.device("npu", index)).untyped_storage()
    tensor = torch.empty(0, dtype=span.dtype, device=storage.device).set_(storage, 0, *layout)
    return tensor.requires_grad_(requires_grad)


def _rebuild_from_bytes(content: bytes, dtype: torch.dtype, layout: _Layout, index: int, requires_grad: bool) -> Tensor:
    span = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return _rebuild(span, layout, index, requires_grad)


def _rebuild_parameter(data: Tensor, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad)
