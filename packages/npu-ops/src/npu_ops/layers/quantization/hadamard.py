"""Defines vLLM's own op that rotates inputs of layers by Hadamard matrices, which its CUDA library alone brings.

Checkpoints of compressed-tensors ask for it by their `transform_config` (QuIP, SpinQuant).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["hadamard"]


def hadamard(x: Tensor, inplace: bool) -> Tensor:
    """Return x [..., n] times Sylvester's matrix over sqrt(n), in x itself if `inplace`; sums are float32.

    Raises ValueError where n is no power of 2.
    """
    n = x.shape[-1]
    if n & (n - 1):
        msg = f"Hadamard transforms take rows of a power of 2, got {n}: quantise with a head_dim that is one."
        raise ValueError(msg)
    y = x.float()
    for half in (1 << bit for bit in range(n.bit_length() - 1)):
        first, second = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
    y = (y / math.sqrt(n)).to(x.dtype)
    return x.copy_(y) if inplace else y


def _define() -> None:
    if hasattr(torch.ops._C, "hadacore_transform"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("hadacore_transform(Tensor! x, bool inplace) -> Tensor")
    library.impl("hadacore_transform", hadamard, "CompositeExplicitAutograd")
    _kept.append(library)


_kept: list[torch.library.Library] = []
_define()
