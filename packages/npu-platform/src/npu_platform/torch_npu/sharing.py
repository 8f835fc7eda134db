"""Owns how npu tensors travel between processes: by value, through a CPU tensor in shared memory."""

from __future__ import annotations

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
        msg = "an npu tensor that is not a leaf cannot be sent to another process: its graph stays here; send tensor.detach()"
        raise RuntimeError(msg)
    return _rebuild, (tensor.detach().cpu().share_memory_(), tensor.device.index, tensor.requires_grad)


def _reduce_parameter(parameter: torch.nn.Parameter) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if parameter.device.type != "npu":
        return torch.multiprocessing.reductions.reduce_tensor(parameter)
    return _rebuild_parameter, (parameter.detach(), parameter.requires_grad)


def _rebuild(shared: Tensor, index: int, requires_grad: bool) -> Tensor:
    return shared.to(torch.device("npu", index)).requires_grad_(requires_grad)


def _rebuild_parameter(data: Tensor, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad)
