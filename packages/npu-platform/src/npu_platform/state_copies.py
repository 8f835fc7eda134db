"""Owns the copies of recurrent states between blocks of the cache, by which vLLM caches prefixes of state models.

With drafts they are those of the V1 runner: V2 launches others, and caches no prefixes of states then (``features``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["after_step", "before_step", "bodies_of_copies", "copy_pieces"]

_OURS = "vllm.v1.worker.mamba_utils"
Piece = tuple[int, int, int]
"""From which address to which one how many bytes are copied."""


def bodies_of_copies(*, of_drafts: bool) -> dict[str, Callable[..., None]]:
    """Return bodies for vLLM's kernels of these copies; those `of_drafts` keep the state of the last accepted token."""
    bodies: dict[str, Callable[..., None]] = {f"{_OURS}.batch_memcpy_kernel": copy_pieces}
    if of_drafts:
        bodies |= {
            f"{_OURS}.precopy_mamba_align_fused_kernel": before_step,
            f"{_OURS}.postprocess_mamba_fused_kernel": after_step,
        }
    return bodies


def copy_pieces(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, BLOCK_SIZE: int) -> None:  # noqa: N803 - vLLM's name
    """Copy pieces of device memory, one after the other; a piece may overlap its target.

    src_ptrs, dst_ptrs: uint64 [n], addresses; sizes: int32 [n], bytes; all on the device.
    """
    del BLOCK_SIZE
    _copy(zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True), src_ptrs.device)


def before_step(
    state_idx: Tensor,
    src_col: Tensor,
    token_bias: Tensor,
    table_ptrs: Tensor,
    table_stride: int,
    *layout: Any,
    **_: Any,
) -> None:
    """Move the state of each request whose next tokens begin a block of the cache to that block.

    state_idx, src_col, token_bias: int32 [requests], the block of the request's table that it goes to, the one where it
    is (-1: there is none yet), and how many drafts were accepted; table_ptrs: int64 [groups], the tables' addresses;
    layout: what :class:`_States` has of each state, then None and the number of requests. V1's order of requests.
    """
    *of_states, _mapping, requests = layout
    moves = zip(src_col.tolist(), state_idx.tolist(), token_bias.tolist(), strict=True)
    chosen = [(row, *move) for row, move in zip(range(requests), moves, strict=False) if move[0] >= 0]
    _move(chosen, _Tables(table_ptrs, table_stride), of_states)


def after_step(
    accepted: Tensor,
    state_idx: Tensor,
    scheduled: Tensor,
    computed: Tensor,
    drafts: Tensor,
    table_ptrs: Tensor,
    table_stride: int,
    *layout: Any,
    block_size: int,
    **_: Any,
) -> None:
    """Keep the state at the end of a block of the cache where a step with drafts has gone beyond it.

    accepted, state_idx, scheduled, computed, drafts: int32 [requests], the tokens that were accepted, the block of the
    request's table where its state is, and the tokens of the step, before it and of its drafts; layout: what
    :class:`_States` has of each state, then the accepted tokens to write to, None and the number of requests.
    """
    *of_states, accepted_out, _mapping, requests = layout
    chosen = []
    steps = zip(*(each.tolist() for each in (accepted, state_idx, scheduled, computed, drafts)), strict=False)
    for row, (taken, source, tokens, before, drafted) in zip(range(requests), steps, strict=False):
        running = before + tokens - drafted
        end = (running + taken - 1) // block_size * block_size
        if end < running:
            continue
        target, bias = end // block_size - 1, end - running
        if source == target:
            accepted_out[row] = 1
        if source != target or bias:
            chosen.append((row, source, target, bias))
    _move(chosen, _Tables(table_ptrs, table_stride), of_states)


class _Tables:
    """The requests' tables of blocks, which vLLM gives by their addresses; rows are read when they are asked for."""

    def __init__(self, addresses: Tensor, stride: int) -> None:
        self._addresses, self._stride, self._device = addresses.tolist(), stride, addresses.device
        self._rows: dict[tuple[int, int], list[int]] = {}

    def row(self, group: int, request: int) -> list[int]:
        """Return the blocks of a request in a group of the cache."""
        from npu_platform import _C

        if (group, request) not in self._rows:
            row = torch.empty(self._stride, dtype=torch.int32, device=self._device)
            size = row.numel() * row.element_size()
            _C.copy_memory(row.data_ptr(), self._addresses[group] + request * size, size)
            self._rows[group, request] = row.tolist()
        return self._rows[group, request]


@dataclass(frozen=True)
class _States:
    """Where the blocks of one state of a layer are, in bytes and elements, in vLLM's order of a kernel's arguments."""

    base: int
    block: int
    element: int
    inner: int
    width: int
    """Tokens of a convolution's state; 0: it is none."""
    group: int
    rows: int
    """Of a convolution's state whose channels come first; 0: its tokens do."""
    row: int

    def pieces(self, blocks: list[int], source: int, target: int, bias: int) -> Iterator[Piece]:
        """Yield what is copied to leave the state after `bias` more tokens in the block `target` of a request.

        Each accepted draft has left its state in a block of its own, that of a convolution too (npu-ops' layers), where
        vLLM's kernels find it in one longer window.
        """
        comes_from, goes_to = (self.base + blocks[place] * self.block for place in (source + bias, target))
        size = self.inner * self.element * max(1, self.width)
        for row in range(max(1, self.rows)):
            yield comes_from + row * self.row, goes_to + row * self.row, size


def _move(moves: list[tuple[int, int, int, int]], tables: _Tables, of_states: list[Tensor]) -> None:
    """Copy all states of some requests: a row of the tables, from which to which block, and the accepted drafts."""
    if not moves:
        return
    states = [_States(*each) for each in zip(*(field.tolist() for field in of_states), strict=True)]
    pieces = (
        piece
        for request, source, target, bias in moves
        for state in states
        for piece in state.pieces(tables.row(state.group, request), source, target, bias)
    )
    _copy(pieces, of_states[0].device)


def _copy(pieces: Iterable[Piece], device: torch.device) -> None:
    from npu_platform import _C

    for source, target, size in pieces:
        if abs(source - target) < size:
            via = torch.empty(size, dtype=torch.uint8, device=device)
            _C.copy_memory(via.data_ptr(), source, size)
            _C.copy_memory(target, via.data_ptr(), size)
        else:
            _C.copy_memory(target, source, size)
