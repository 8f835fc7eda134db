"""Owns how npu tensors travel between processes: by value, through shared memory or with a new process."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing.reductions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


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
    host = tensor.detach().cpu()
    if get_spawning_popen() is not None:
        # An argument of a spawned process is read after this function: a descriptor of `host` would be closed by then.
        content = host.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _rebuild_from_bytes, (content, host.dtype, host.shape, tensor.device.index, tensor.requires_grad)
    return _rebuild, (host.share_memory_(), tensor.device.index, tensor.requires_grad)


def _reduce_parameter(parameter: torch.nn.Parameter) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if parameter.device.type != "npu":
        return torch.multiprocessing.reductions.reduce_tensor(parameter)
    return _rebuild_parameter, (parameter.detach(), parameter.requires_grad)


def _rebuild(shared: Tensor, index: int, requires_grad: bool) -> Tensor:
    return shared.to(torch.device("npu", index)).requires_grad_(requires_grad)


def _rebuild_from_bytes(
    content: bytes, dtype: torch.dtype, shape: torch.Size, index: int, requires_grad: bool
) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return _rebuild(flat.reshape(shape), index, requires_grad)


def _rebuild_parameter(data: Tensor, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad)
