"""Mixed precision under the names of ``torch.cuda.amp``; ``torch.autocast("npu")`` and ``torch.amp`` do the same."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="npu")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="npu")


class autocast(torch.autocast):  # noqa: N801 - the name in torch.cuda.amp
    """``torch.autocast("npu")``, by default to float16."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True) -> None:
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("npu")``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("npu", *args, **kwargs)
