"""transformers' KV cache with keys and values rounded to codes, as vLLM's quantised caches hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["ROUNDINGS", "rounded_cache"]


def rounded_cache(name: str, exact: Collection[int] = ()) -> transformers.Cache:
    """Return an empty cache for one forward of a model, of the codes that vLLM's ``kv_cache_dtype`` names so.

    `exact`: layers that keep the model's dtype.
    """
    return _RoundedCache(ROUNDINGS[name], exact)


class _RoundedCache(transformers.DynamicCache):
    def __init__(self, rounds: Callable[[torch.Tensor], torch.Tensor], exact: Collection[int]) -> None:
        super().__init__()
        self._rounds, self._exact = rounds, exact

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep and return what the codes of [batch, heads, tokens, dim] mean."""
        if layer_idx in self._exact:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return super().update(self._rounds(key_states), self._rounds(value_states), layer_idx, *args, **kwargs)


def _fp8(x: torch.Tensor) -> torch.Tensor:
    """e4m3; a checkpoint without scales has scales of one."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _int8(x: torch.Tensor) -> torch.Tensor:
    """Integers of eight bits with a scale for each token and head."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
    return ((wide / scale).round() * scale).to(x.dtype)


ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"fp8": _fp8, "int8_per_token_head": _int8}
