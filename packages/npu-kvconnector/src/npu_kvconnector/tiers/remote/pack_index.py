"""PackIndex: which pack holds which block, for the packs that this server knows of; the oldest go when it is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_kvconnector.tiers.remote.pack import Place

__all__ = ["PackIndex"]


class PackIndex:
    """Names of blocks, and the pack and place of each; a name in two packs is found in the one added last."""

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._places: dict[bytes, tuple[str, Place]] = {}
        self._packs: dict[str, list[bytes]] = {}
        self.newest: str | None = None
        """The last pack by name, which begins with a time."""

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: bytes) -> tuple[str, Place] | None:
        """Return the pack and the place of a block."""
        return self._places.get(name)

    def knows(self, pack: str) -> bool:
        """Whether the pack has been added, and not dropped."""
        return pack in self._packs

    def packs(self) -> list[str]:
        """Return the packs that are known, those added first in front."""
        return list(self._packs)

    def add(self, pack: str, places: Sequence[Place]) -> None:
        """Add a pack; one without places is known, and holds nothing."""
        self._packs[pack] = [place.name for place in places]
        self._places.update((place.name, (pack, place)) for place in places)
        self.newest = max(self.newest or pack, pack)
        while len(self._places) > self._most and len(self._packs) > 1:
            self.drop(next(iter(self._packs)), known=True)

    def drop(self, pack: str, *, known: bool = False) -> None:
        """Leave out a pack's blocks; where it stays ``known``, a listing does not bring it back."""
        for name in self._packs.pop(pack, ()):
            found = self._places.get(name)
            if found is not None and found[0] == pack:
                del self._places[name]
        if known:
            self._packs[pack] = []

    def forget(self, name: bytes) -> None:
        """Leave out one block."""
        self._places.pop(name, None)
