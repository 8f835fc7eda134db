"""Room: whether a load leaves on the device what its request, and those that have loaded before, need to go on.

Note [Loads that wait for each other]. A request that has loaded keeps its blocks until it is through, also while it
waits for those of its other tokens: only requests that run are preempted. vLLM lets a load begin where the device has
room for the whole of its prompt and of those before, but of layers with windows it counts too little: it takes the
blocks behind the window off what a window can have at most, and not off the prompt. So requests may load until each
waits for the blocks of another, for ever. Here they wait before they load. One that loads alone needs no room: vLLM's
start has seen that the longest request fits, and those that run end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

__all__ = ["Room"]


class Room:
    """The requests that load or have loaded and do not run yet, and the blocks they need to begin."""

    def __init__(self, caches: KVCacheManager, *, tokens_ahead: int = 0) -> None:
        """Start without loads; ``tokens_ahead`` is of how many tokens to come a step takes blocks."""
        self._pool = caches.block_pool
        self._groups: tuple[SingleTypeKVCacheManager, ...] = tuple(caches.coordinator.single_type_managers)
        self._longest = caches.max_model_len
        self._tokens_ahead = tokens_ahead
        self._has_windows = any(group.max_admission_blocks_per_request is not None for group in self._groups)
        self._loaded: dict[str, Request] = {}

    def note_load(self, request: Request) -> None:
        """Take note that a request has blocks for a load."""
        if self._has_windows:
            self._loaded[request.request_id] = request

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests that run or have ended."""
        for name in requests:
            self._loaded.pop(name, None)

    def is_enough(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether a request may load, of which so many tokens are computed then; see the module's note."""
        others = [other for other in self._loaded.values() if other is not request]
        if not others:
            return True
        wanted = self._missing(request, num_computed_tokens)
        wanted += sum(self._missing(other, other.num_computed_tokens) for other in others)
        return wanted <= self._pool.get_num_free_blocks()

    def _missing(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many blocks a request needs beside those that it has."""
        missing = 0
        tokens = min(request.num_tokens + self._tokens_ahead, self._longest)
        for group in self._groups:
            behind = group.get_num_skipped_tokens(num_computed_tokens) // group.block_size
            wanted = cdiv(tokens, group.block_size) - behind
            if group.max_admission_blocks_per_request is not None:
                wanted = min(wanted, group.max_admission_blocks_per_request)
            has = sum(not block.is_null for block in group.req_to_blocks.get(request.request_id, ()))
            missing += max(wanted - has, 0)
        return missing
