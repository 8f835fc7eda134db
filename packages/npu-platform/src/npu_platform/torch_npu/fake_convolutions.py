"""Owns the layout that ``torch.compile`` expects of npu's convolutions: that of the CPU kernels which compute them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_OPS = {
    _aten.convolution.default,
    _aten._convolution.default,
    _aten._convolution.deprecated,
    _aten.convolution_backward.default,
}


def register() -> None:
    """Put the rule before those of torch, which take any out-of-tree device's convolutions for contiguous."""
    fake_impls.op_implementations_checks.insert(0, (_OPS.__contains__, _convolution))


def _convolution(mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Return what the op gives for tensors of the CPU with the same strides, on npu; NotImplemented for others."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type == "npu"), None)
    if device is None:
        return NotImplemented
    with mode:
        on_host = functools.partial(_like, device=torch.device("cpu"))
        args, kwargs = pytree.tree_map_only(Tensor, on_host, (args, kwargs))
        return pytree.tree_map_only(Tensor, functools.partial(_like, device=device), op(*args, **kwargs))


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
