"""Owns what layers do once, after their weights are loaded and before the first request.

The method of a layer (``quant_method``) may have the static hook ``npu_warm_up(layers, rows) -> None``, by which
npu-ops (or a vendor's package) measures or compiles; it gets all layers of the model whose method has the same hook.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["warm_up"]

HOOK = "npu_warm_up"


def warm_up(model: nn.Module, rows: int) -> None:
    """Call the hooks of the model's layers; `rows`: the most tokens of a step."""
    layers: dict[Callable[[list[nn.Module], int], None], list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        hook = getattr(type(getattr(module, "quant_method", None)), HOOK, None)
        if hook is not None:
            layers[hook].append(module)
    for hook, modules in layers.items():
        hook(modules, rows)
