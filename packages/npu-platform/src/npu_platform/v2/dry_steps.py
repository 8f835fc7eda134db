"""Steps for their kernels alone: the linear layers, which are their time, compute nothing and give zeros."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["without_products"]

_LINEAR = frozenset({"npu_ops::linear", "aten::linear"})


def without_products(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of the model in which linear layers give zeros, so that it reads none of their weights.

    Where no kernel writes a layer's result, what was in its memory would be in it, and the caches of keys and values,
    which requests get later, would have it: a number that is none stays one, whatever it is multiplied by.
    """

    @functools.wraps(step)
    def dry(*args: Any, **kwargs: Any) -> Any:
        with torch.npu.skip_kernels(*_LINEAR), _Zeros():
            return step(*args, **kwargs)

    return dry


class _Zeros(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.name().partition(".")[0] in _LINEAR else result
