"""Owns what generated code calls while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_platform import _C

if TYPE_CHECKING:
    from torch import Tensor

empty_strided_npu = _C.empty_strided


def host_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor of the host that a fused kernel reads, such as a single value.

    Raises:
        RuntimeError: a graph is captured: its replays would read memory that may be gone.
    """
    if _C.is_capturing():
        msg = (
            "npu: a fused kernel that reads a tensor of the host is not permitted while a graph is captured; move the "
            "tensor to npu before"
        )
        raise RuntimeError(msg)
    return tensor
