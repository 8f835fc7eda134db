"""Which segment goes when room is needed: the one least worth keeping, by what was used of it and when.

Space is given back a segment at a time, so the policies are those of caches in units of segments. *LRU*: a segment's
heat is the sum of its blocks' bytes, each times the tick of its last use, by byte of the file; blocks that are gone
count nothing, so a segment of which little is left goes first. *ARC* (N. Megiddo and D. Modha, "ARC: a self-tuning, low
overhead replacement cache", FAST 2003): blocks that were not used since they were stored, and those that were, have
their heat apart. Which of the two gives room follows from what comes back after it was given up, so that prompts that
are asked once do not push out those that are asked again and again.

What is hot in a segment that goes is written again into the newest one, up to a quarter of it, so that a prefix in use
does not go with the cold blocks beside it.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from npu_kvconnector.tiers.durable.envelope import record_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npu_kvconnector.tiers.durable.index import Entry

__all__ = ["POLICIES", "AdaptiveHeat", "Heat"]

_GHOSTS = 2**18
"""The most names of blocks given up that are remembered, of those used and of those not; about 150 bytes each."""


@dataclasses.dataclass(slots=True)
class _Share:
    """What a segment holds of blocks that were used since they were stored, or that were not."""

    bytes: int = 0
    heat: int = 0


class Heat:
    """Least recently used: the heat of each segment, kept up as blocks are stored, used and forgotten."""

    def __init__(self) -> None:
        """Begin without segments."""
        self._shares: dict[tuple[int, bool], _Share] = {}
        self._bytes = {False: 0, True: 0}  # of all blocks not used since they were stored, and of those that were

    def add(self, entry: Entry) -> None:
        """Count a block in."""
        self._count(entry, 1)

    def remove(self, entry: Entry) -> None:
        """Count a block out."""
        self._count(entry, -1)

    def drop(self, segment: int, entries: Iterable[tuple[bytes, Entry]]) -> None:
        """Forget a segment; ``entries`` are the blocks that go with it."""
        for is_used in (False, True):
            share = self._shares.pop((segment, is_used), None)
            self._bytes[is_used] -= 0 if share is None else share.bytes

    def returns(self, name: bytes) -> bool:
        """Say whether a block that is stored now was given up not long ago, and learn from it."""
        return False

    def coldest(self, sizes: dict[int, int], *, keep: int | None) -> int | None:
        """Return the segment to give up, the older of two alike, or None where there is none.

        Args:
            sizes: bytes of the files, by number.
            keep: the segment that is being filled.
        """
        found = [number for number in sizes if number != keep]
        return min(found, key=lambda number: (self._worth(number) / max(sizes[number], 1), number), default=None)

    def hottest(self, entries: Iterable[tuple[bytes, Entry]], *, tick: int, room: int) -> list[tuple[bytes, Entry]]:
        """Return the blocks that are to outlive their segment: used since they were stored, and lately.

        Args:
            entries: what the segment holds.
            tick: of now.
            room: bytes of records that may be kept.
        """
        found = [(name, entry) for name, entry in entries if _is_used(entry)]
        found.sort(key=lambda pair: pair[1].used_tick, reverse=True)
        chosen = []
        for name, entry in found:
            room -= record_bytes(entry.place.size)
            if room < 0 or not self._is_warm(entry, tick):
                break
            chosen.append((name, entry))
        return chosen

    def _count(self, entry: Entry, sign: int) -> None:
        is_used, size = _is_used(entry), sign * record_bytes(entry.place.size)
        share = self._shares.setdefault((entry.place.segment, is_used), _Share())
        share.bytes += size
        share.heat += size * entry.used_tick
        self._bytes[is_used] += size

    def _worth(self, segment: int) -> float:
        return self._heat_of(segment, is_used=False) + self._heat_of(segment, is_used=True)

    def _heat_of(self, segment: int, *, is_used: bool) -> int:
        share = self._shares.get((segment, is_used))
        return 0 if share is None else share.heat

    def _is_warm(self, entry: Entry, tick: int) -> bool:
        return 2 * entry.used_tick >= tick


class AdaptiveHeat(Heat):
    """ARC: room comes from blocks not used yet while they take more than ``target`` bytes, else from those used."""

    def __init__(self) -> None:
        """Begin without segments, and with nothing learnt; what was learnt does not outlive the process."""
        super().__init__()
        self.target = 0
        self._ghosts: dict[bool, collections.OrderedDict[bytes, int]] = {
            is_used: collections.OrderedDict() for is_used in (False, True)
        }

    def drop(self, segment: int, entries: Iterable[tuple[bytes, Entry]]) -> None:
        """Forget a segment, but not the names of its blocks."""
        for name, entry in entries:
            ghosts = self._ghosts[_is_used(entry)]
            ghosts[name] = record_bytes(entry.place.size)
            ghosts.move_to_end(name)
            while len(ghosts) > _GHOSTS:
                ghosts.popitem(last=False)
        super().drop(segment, entries)

    def returns(self, name: bytes) -> bool:
        """Say whether the block was given up not long ago; its kind should have had more room then."""
        for is_used, ghosts in self._ghosts.items():
            size = ghosts.pop(name, None)
            if size is not None:
                others = self._ghosts[not is_used]
                step = size * max(1, len(others) // (len(ghosts) + 1))
                self.target = (
                    max(0, self.target - step) if is_used else min(sum(self._bytes.values()), self.target + step)
                )
                return True
        return False

    def _worth(self, segment: int) -> float:
        """Return the heat of the blocks that are to stay; that of the others only decides between segments alike."""
        is_used_to_stay = self._takes_unused()
        kept = self._heat_of(segment, is_used=is_used_to_stay)
        return kept + 1e-6 * self._heat_of(segment, is_used=not is_used_to_stay)

    def _is_warm(self, entry: Entry, tick: int) -> bool:
        return self._takes_unused() or super()._is_warm(entry, tick)

    def _takes_unused(self) -> bool:
        return self._bytes[False] > self.target


POLICIES: dict[str, type[Heat]] = {"lru": Heat, "arc": AdaptiveHeat}
"""By their names in the configuration."""


def _is_used(entry: Entry) -> bool:
    return entry.used_tick > entry.stored_tick
