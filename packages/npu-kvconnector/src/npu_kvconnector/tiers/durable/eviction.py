"""Which segment goes when room is needed: the one least worth keeping, by what was used of it and when.

Least recently used, in the units in which space can be given back. A segment's *heat* is the sum of its blocks' bytes,
each times the tick of its last use, by byte of the file; blocks that are gone count nothing, so a segment of which
little is left goes first. What is hot in a segment that goes is written again into the newest one, up to a quarter of
it, so that a prefix in use does not go with the cold blocks beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_kvconnector.tiers.durable.envelope import record_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npu_kvconnector.tiers.durable.index import Entry

__all__ = ["Heat", "hottest"]


class Heat:
    """The heat of each segment, kept up as blocks are stored, used and forgotten."""

    def __init__(self) -> None:
        """Begin without segments."""
        self._sums: dict[int, int] = {}

    def add(self, entry: Entry) -> None:
        """Count a block in."""
        segment = entry.place.segment
        self._sums[segment] = self._sums.get(segment, 0) + record_bytes(entry.place.size) * entry.used_tick

    def remove(self, entry: Entry) -> None:
        """Count a block out."""
        segment = entry.place.segment
        self._sums[segment] = self._sums.get(segment, 0) - record_bytes(entry.place.size) * entry.used_tick

    def drop(self, segment: int) -> None:
        """Forget a segment."""
        self._sums.pop(segment, None)

    def coldest(self, sizes: dict[int, int], *, keep: int | None) -> int | None:
        """Return the segment to give up, the older of two alike, or None where there is none.

        Args:
            sizes: bytes of the files, by number.
            keep: the segment that is being filled.
        """
        found = [number for number in sizes if number != keep]
        return min(found, key=lambda number: (self._sums.get(number, 0) / max(sizes[number], 1), number), default=None)


def hottest(entries: Iterable[tuple[bytes, Entry]], *, tick: int, room: int) -> list[tuple[bytes, Entry]]:
    """Return the blocks that are to outlive their segment: used since they were stored, and lately.

    Args:
        entries: what the segment holds.
        tick: of now.
        room: bytes of records that may be kept.
    """
    found = [(name, entry) for name, entry in entries if entry.used_tick > entry.stored_tick]
    found.sort(key=lambda pair: pair[1].used_tick, reverse=True)
    chosen = []
    for name, entry in found:
        room -= record_bytes(entry.place.size)
        if room < 0 or 2 * entry.used_tick < tick:
            break
        chosen.append((name, entry))
    return chosen
