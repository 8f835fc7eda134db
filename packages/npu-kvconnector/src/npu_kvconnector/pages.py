"""Where the pages of a KV cache group lie on the device and in the host tier, and copies of runs of them.

Layers whose pages lie at equal distances on both sides form a *stack*: one copy moves a run of blocks of all of them,
as a strided tensor [layers, blocks, fragments, bytes]. In vLLM's layouts that is all layers of a group.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from npu_kvconnector.transfer import Pairs, Run

__all__ = ["MOST_BYTES", "WHOLE", "Axis", "PageMap", "Stack", "stack_up"]

MOST_BYTES = 4 << 20
"""Of one copy: a device without strided copies to the host stages it in its own memory, and a step waits for it."""

_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Axis(NamedTuple):
    """A dimension of the bytes to copy: how many, and how far apart on each side, in bytes."""

    number: int
    device: int
    host: int


WHOLE = Axis(1, 0, 0)
"""A page in one piece."""


@dataclasses.dataclass(frozen=True)
class PageMap:
    """Where one part of one layer's pages lies: from `device` and `host` in bytes of the two memories.

    Block b begins at device + b * block; place p of the host tier at host + (p // blocks_per_chunk) * row +
    (p % blocks_per_chunk) * page. From there `fragments.number` pieces of `size` bytes. `writers` says which
    places this worker writes, where several hold the same bytes: those with place % writers[0] == writers[1].
    """

    device: int
    host: int
    block: int
    row: int
    page: int
    size: int
    fragments: Axis = WHOLE
    writers: tuple[int, int] = (1, 0)

    def shape(self) -> tuple[object, ...]:
        """Return what pages of one stack have in common."""
        return (self.block, self.row, self.page, self.size, self.fragments, self.writers)


class Pieces(NamedTuple):
    """Addresses of the pieces of a copy on both sides, and the bytes of each."""

    device: NDArray[np.int64]
    host: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def join(cls, device: NDArray[np.int64], host: NDArray[np.int64], size: int) -> Pieces:
        """Return pieces of `size` bytes each, with those that lie in a row on both sides as one."""
        is_first = np.ones(len(device), dtype=np.bool_)
        is_first[1:] = (np.diff(device) != size) | (np.diff(host) != size)
        starts = np.flatnonzero(is_first)
        counts = np.diff(starts, append=len(device))
        return cls(device[starts], host[starts], counts * size)


class Stack:
    """Layers at equal distances, see above."""

    def __init__(
        self, device: torch.Tensor, host: torch.Tensor, first: PageMap, layers: Axis, blocks_per_chunk: int
    ) -> None:
        """Prepare copies between the storage of ``device`` and that of ``host`` (any tensors of theirs).

        ``memory`` is all of the device's, as bytes; ``shape`` its layers, fragments and the bytes of one, as
        ``torch.ops.npu_ops.copy_pages`` takes them.
        """
        distances = (*first.fragments[1:], *layers[1:], first.block, first.row, first.page)
        width = math.gcd(8, first.device, first.host, first.size, *distances)
        self.writers = first.writers
        self.memory = _all_of(device, torch.int8)
        self.shape = (*layers, *first.fragments, first.size)
        self._first = first
        self._width = width
        self._device = _all_of(device, _WIDTHS[width])
        self._host = _all_of(host, _WIDTHS[width])
        self._blocks_per_chunk = blocks_per_chunk
        self.bytes_of_block = layers.number * first.fragments.number * first.size
        self._at_device, self._at_host = first.device // width, first.host // width
        self._block, self._row, self._page = first.block // width, first.row // width, first.page // width
        self._layers = Axis(layers.number, layers.device // width, layers.host // width)
        self._fragments = Axis(first.fragments.number, first.fragments.device // width, first.fragments.host // width)
        self._size = first.size // width

    def offsets(self, pairs: Pairs) -> NDArray[np.int64]:
        """Return [pairs, 2]: where, in bytes of either memory, blocks and their places begin in the first layer."""
        chunks, inside = np.divmod(pairs.places, self._blocks_per_chunk)
        first = self._first
        on_device = first.device + pairs.blocks * first.block
        return np.stack((on_device, first.host + chunks * first.row + inside * first.page), axis=1)

    def addresses(self, pairs: Pairs) -> Pieces:
        """Return the pieces without gaps that blocks and their places, which the caller has checked, consist of."""
        on_device, on_host = self.offsets(pairs).T
        width = self._width
        on_device = self._spread(on_device, self._layers.device * width, self._fragments.device * width)
        on_host = self._spread(on_host, self._layers.host * width, self._fragments.host * width)
        return Pieces.join(
            self._device.data_ptr() + on_device, self._host.data_ptr() + on_host, self._size * self._width
        )

    def copy(self, runs: Sequence[Run], *, to_host: bool) -> int:
        """Copy runs, which the caller has checked, and return their bytes; on a stream they are only issued."""
        return sum(self.pieces(runs, to_host=to_host))

    def pieces(self, runs: Sequence[Run], *, to_host: bool) -> Iterator[int]:
        """Copy runs piece by piece; yield the bytes of each once it is issued."""
        most = max(1, MOST_BYTES // self.bytes_of_block)
        for block, place, length in runs:
            for offset in range(0, length, most):
                step = min(most, length - offset)
                on_device, on_host = self._views(block + offset, place + offset, step)
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=True)
                yield step * self.bytes_of_block

    def _spread(self, starts: NDArray[np.int64], layer: int, fragment: int) -> NDArray[np.int64]:
        """Return where each fragment of each layer begins, from where blocks begin, in an order in which many join."""
        layers = np.arange(self._layers.number) * layer
        fragments = np.arange(self._fragments.number) * fragment
        places = starts[:, None, None] + layers[:, None] + fragments
        has_layers_in_a_row = self._layers.device == self._layers.host == self._fragments.number * self._size
        return (places if has_layers_in_a_row else places.swapaxes(0, 1)).ravel()

    def _views(self, block: int, place: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a run on the device and on the host, each [layers, blocks, fragments, elements]."""
        chunk, inside = divmod(place, self._blocks_per_chunk)
        between = self._row if self._blocks_per_chunk == 1 else self._page
        shape = (self._layers.number, length, self._fragments.number, self._size)
        device = self._device.as_strided(
            shape,
            (self._layers.device, self._block, self._fragments.device, 1),
            self._at_device + block * self._block,
        )
        host = self._host.as_strided(
            shape,
            (self._layers.host, between, self._fragments.host, 1),
            self._at_host + chunk * self._row + inside * self._page,
        )
        return device, host


def stack_up(maps: Sequence[tuple[torch.Tensor, PageMap]], host: torch.Tensor, blocks_per_chunk: int) -> list[Stack]:
    """Return stacks of the maps of one group, each with a tensor of its device memory, in as few stacks as possible."""
    stacks, start = [], 0
    while start < len(maps):
        device, first = maps[start]
        end, distance = start + 1, (0, 0)
        while end < len(maps) and _is_like(maps[start], maps[end]):
            last, here = maps[end - 1][1], maps[end][1]
            step = (here.device - last.device, here.host - last.host)
            if end > start + 1 and step != distance:
                break
            distance = step
            end += 1
        stacks.append(Stack(device, host, first, Axis(end - start, *distance), blocks_per_chunk))
        start = end
    return stacks


def _is_like(one: tuple[torch.Tensor, PageMap], other: tuple[torch.Tensor, PageMap]) -> bool:
    same_memory = one[0].untyped_storage().data_ptr() == other[0].untyped_storage().data_ptr()
    goes_forwards = other[1].device > one[1].device and other[1].host > one[1].host  # as as_strided must
    return same_memory and goes_forwards and one[1].shape() == other[1].shape()


def _all_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole storage of a tensor as one row."""
    storage = tensor.untyped_storage()
    whole = torch.tensor([], dtype=dtype, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))  # type: ignore[arg-type]
