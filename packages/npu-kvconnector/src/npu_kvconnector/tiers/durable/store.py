"""DurableStore: the writer of a store, one a folder. See Note [What is durable] in the package's docstring.

Note [A failed fdatasync]. After one, the kernel may call pages clean that never reached the disk, so a second try would
succeed and mean nothing. What was appended since the last commit is therefore given up, its segment gets no more
records, and the next block goes into a new one. An index that cannot be written ends the writer: what is there stays
readable.

Note [A full disk]. Others fill it, too. A transaction of the index needs new pages, one that gives room back as well.
So where there are none, the file of the coldest segment goes first, and then the index forgets it. Who reads meanwhile,
or after a crash in between, finds no file, which is a miss.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb

from npu_kvconnector.errors import IntegrityError, StoreError
from npu_kvconnector.tiers.durable.disk_errors import is_full, way_out
from npu_kvconnector.tiers.durable.envelope import Header, record_bytes
from npu_kvconnector.tiers.durable.eviction import POLICIES
from npu_kvconnector.tiers.durable.files import PAGE, make_folder, page_buffer, write_whole
from npu_kvconnector.tiers.durable.index import Batch, Entry, Index
from npu_kvconnector.tiers.durable.lock import StoreFullError, lock_store
from npu_kvconnector.tiers.durable.reader import FORMAT, StoreReader
from npu_kvconnector.tiers.durable.recovery import newest_index, recover
from npu_kvconnector.tiers.durable.segments import SegmentReader, SegmentWriter, segment_path
from npu_kvconnector.tiers.durable.sizes import map_bytes, segment_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from npu_kvconnector.tiers.durable.segments import Place

__all__ = ["COMMIT_SECONDS", "DurableStore", "Record"]

COMMIT_SECONDS = 0.5
"""A block is made durable at most this long after it came, however late it was appended."""
_COMMIT_BYTES = 64 * 2**20
_PENDING_SHARE = 4096  # bytes of the index for a block of a transaction, at least
_WRITE_BYTES = 16 * 2**20  # of one call
_MOST_DELAYS = 65_536  # that are kept until somebody takes them
_FULL = 0.3  # of the index: a transaction may write each page anew, and those of the one before are not free yet
_TRIES = 3  # to write the index, on a disk that others fill


class Record(NamedTuple):
    """A block to store."""

    name: bytes
    realm: bytes
    payload: memoryview
    block_bytes: int = 0
    """Of the block itself; 0: the payload's."""
    codec: int = 0
    """What made the payload of it."""
    came: float = -math.inf
    """When the caller was given the block, by ``time.monotonic()``; -inf: now."""


class DurableStore(StoreReader):
    """Stores blocks within a quota. Methods may be called from several threads; stores are done one after another."""

    def __init__(
        self,
        folder: Path,
        *,
        quota: int,
        block_bytes: int,
        direct: bool = True,
        commit_seconds: float = COMMIT_SECONDS,
        eviction_policy: str = "lru",
    ) -> None:
        """Open or make the store and bring it in order.

        Args:
            folder: of the store; an empty or missing one becomes a store.
            quota: bytes on disk, index and all.
            block_bytes: of the largest payload.
            direct: past the page cache, where the filesystem can do it.
            commit_seconds: after a block came, until a commit begins; 0 leaves commits to the caller.
            eviction_policy: "lru" or "arc", which segment goes when room is needed.

        Raises:
            OptionError: the folder or the quota cannot be used.
            StoreBusyError: another process writes the store.
            StoreFullError: its disk has no room.
            StoreError: it cannot be brought in order.
        """
        self.evicted = self.stored = self.lost = 0
        self._batch, self._committing = Batch(), Batch()
        self._uses: dict[bytes, Entry] = {}
        self._pending_bytes = 0
        self._came: list[float] = []  # when what is pending came
        self._delays: collections.deque[float] = collections.deque(maxlen=_MOST_DELAYS)
        self.failure: str | None = None
        self._heat = POLICIES[eviction_policy]()
        self._map_size = map_bytes(quota, block_bytes)
        self._most_pending = self._map_size // _PENDING_SHARE
        self._budget = quota - self._map_size
        self._segment_bytes = segment_bytes(self._budget, block_bytes, quota)
        self._lock_descriptor = lock_store(folder)
        try:
            make_folder(folder / "segments")
            if not (folder / "store.json").exists():
                write_whole(folder / "store.json", json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}).encode())
            super().__init__(folder, direct=direct)
        except (OSError, lmdb.Error) as error:
            os.close(self._lock_descriptor)
            msg = f"the store in {folder} cannot be opened: {error}{way_out(error)}"
            raise (StoreFullError if is_full(error, folder) else StoreError)(msg) from error
        except BaseException:
            os.close(self._lock_descriptor)
            raise
        self._writing = threading.Lock()  # held while records are appended, committed or dropped
        self._active: SegmentWriter | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._is_closed = False
        self._committer: threading.Thread | None = None
        if commit_seconds > 0:
            self._committer = threading.Thread(target=self._commit_in_time, args=(commit_seconds,), daemon=True)
            self._committer.start()

    # --- what is asked of a writer ----------------------------------------------------------------------------------

    def find(self, name: bytes) -> Entry | None:
        """Return where a block lies, stored a moment ago or not."""
        with self._lock:
            pending = self._batch.puts.get(name) or self._committing.puts.get(name)
            if name in self._batch.forgets or name in self._bad:
                return None
        return pending or super().find(name)

    def put(self, name: bytes, realm: bytes, payload: memoryview, *, block_bytes: int = 0, codec: int = 0) -> bool:
        """Store a block, as :meth:`put_all` does; return False where it is there already."""
        return self.put_all([Record(name, realm, payload, block_bytes, codec)]) == 1

    def put_all(self, records: Sequence[Record]) -> int:
        """Store blocks, several at a time; return the number of those that were not there already.

        Raises:
            StoreError: not all could be stored; blocks of before are as they were.
        """
        left = [record for record in {record.name: record for record in records}.values() if record.name not in self]
        count = len(left)
        now = time.monotonic()
        with self._writing, self._as_store_error("a block could not be stored"):
            while left:
                stored = self._append([(_header(record), record.payload) for record in left])
                with self._lock:
                    self._came += [now if record.came < 0 else record.came for record in left[:stored]]
                self._wake.set()
                self.stored += stored
                left = left[stored:]
                if self._pending_bytes >= _COMMIT_BYTES or len(self._batch.puts) >= self._most_pending:
                    self._commit()
        return count

    def describe_realm(self, realm: bytes, about: dict[str, Any]) -> None:
        """Keep what a realm stands for, for people who look."""
        with self._lock:
            self._batch.realms[realm] = about

    def touch(self, name: bytes) -> None:
        """Take note of a use of a block, which keeps it for longer."""
        entry = self.find(name)
        if entry is not None:
            self._note_use(name, entry)

    def commit(self) -> None:
        """Make durable what has been stored so far.

        Raises:
            StoreError: that failed; what was stored since the last commit is gone.
        """
        with self._writing, self._as_store_error("blocks could not be made durable"):
            self._commit()

    def forget_realm(self, realm: bytes | None, older_than: float = float("inf")) -> int:
        """Remove blocks of a realm (None: of all) stored before a time; return their number.

        Their space is given back when their segments go, which are then the first to; :meth:`shrink` drops those with
        no other blocks.
        """
        self.commit()
        with self._writing, self._as_store_error("blocks could not be removed"):
            chosen = [
                (name, entry)
                for name, entry in self._index.entries()
                if realm in {None, entry.realm} and entry.stored_at < older_than
            ]
            forgotten = self._index.forget(name for name, _ in chosen)
            for _, entry in chosen:
                self._heat.remove(entry)
            return forgotten

    def shrink(self, quota: int) -> int:
        """Drop segments without blocks, then others until the files take no more than ``quota`` bytes.

        Returns:
            The bytes given back.

        Raises:
            StoreError: the index cannot be written.
        """
        self.commit()
        with self._writing, self._as_store_error("room could not be made"):
            self._seal()
            before = self.bytes_on_disk()
            for number in [number for number in self._sizes if not self._index.held_by(number)]:
                self._drop(number)
            while self.bytes_on_disk() > quota and self._drop_coldest(keep=None):
                pass
            return before - self.bytes_on_disk()

    def bytes_on_disk(self) -> int:
        """Return the bytes of the segments and of what was set aside; the index is not counted."""
        aside = sum(path.stat().st_size for path in (self.folder / "quarantine").rglob("*") if path.is_file())
        return sum(self._sizes.values()) + aside

    @property
    def segment_bytes_on_disk(self) -> int:
        """Bytes of the segments."""
        return sum(self._sizes.copy().values())

    def take_delays(self) -> list[float]:
        """Return how many seconds after they came blocks were durable, of those that became it since the last call."""
        with self._lock:
            delays = list(self._delays)
            self._delays.clear()
        return delays

    def abandon(self) -> None:
        """Give the lock back after a failure, and go on reading; another writer may start."""
        if not self._is_closed:
            self._is_closed = True
            self._closing.set()
            self._wake.set()
            self.failure = self.failure or "the store was opened again"
            os.close(self._lock_descriptor)

    def close(self) -> None:
        """Commit, close everything and give the lock back; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._closing.set()
        self._wake.set()
        if self._committer is not None:
            self._committer.join()
        with self._writing:
            with contextlib.suppress(OSError, lmdb.Error):
                self._seal()
                self._commit()
            super().close()
            os.close(self._lock_descriptor)

    @contextlib.contextmanager
    def _as_store_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, lmdb.Error) as error:
            msg = f"{what} in {self.folder}: {error}{way_out(error)}"
            raise StoreError(msg) from error

    # --- stores -----------------------------------------------------------------------------------------------------

    def _append(self, records: Sequence[tuple[Header, memoryview]], used_tick: int | None = None) -> int:
        """Append records, as many at once as the segment has room for, and return their number.

        ``used_tick`` is that of a block which is carried over.
        """
        if self.failure is not None:
            raise OSError(errno.EIO, self.failure)
        size = len(records[0][1])
        if record_bytes(size) + PAGE > self._segment_bytes:
            msg = f"a block of {size} bytes does not fit a segment of {self._segment_bytes}; raise bytes"
            raise OSError(errno.EFBIG, msg)
        if self._active is None or not self._active.has_room(size):
            self._begin_segment()
        if self._active is None:
            raise OSError(errno.EIO, "the new segment could not be written")
        ends = itertools.accumulate(record_bytes(len(payload)) for _, payload in records)
        room = min(self._active.room, _WRITE_BYTES)
        records = records[: max(1, bisect.bisect_right(list(ends), room))]
        try:
            places = self._active.append(records)
        except OSError:
            self._seal()  # the disk may be bad in this place
            raise
        for (header, _), place in zip(records, places, strict=True):
            self._note_appended(header, place, used_tick)
        return len(records)

    def _note_appended(self, header: Header, place: Place, used_tick: int | None) -> None:
        with self._lock:
            tick = self._next_tick()
            if used_tick is None:
                used_tick = tick + self._heat.returns(header.name)
            stored = (header.block_bytes, header.codec, header.realm, header.stored_at)
            entry = Entry(place, *stored, min(used_tick, tick), used_tick)
            self._bad.pop(header.name, None)
            self._batch.forgets.pop(header.name, None)
            self._batch.puts[header.name] = entry
            self._heat.add(entry)
            self._pending_bytes += record_bytes(place.size)

    def _begin_segment(self) -> None:
        """Make room, begin a new segment, and bring into it what is hot of the one to go next."""
        self._seal()
        while self.bytes_on_disk() + self._segment_bytes > self._budget:
            if not self._drop_coldest(keep=None):
                break
        self._empty_index()
        number = self._next_segment
        self._next_segment += 1
        folder, size = self._segments_folder, self._segment_bytes
        while True:
            try:
                self._active = SegmentWriter(folder, number, self.identity, size=size, direct=self._direct)
                break
            except OSError as error:
                # Others fill the disk: do with less.
                if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not self._drop_coldest(keep=None):
                    raise
        self._sizes[number] = size
        if self.bytes_on_disk() + size > self._budget:
            self._empty_coldest()

    def _empty_index(self) -> None:
        """Leave the index the pages that its next transactions need."""
        while self._index.fill() > _FULL:
            victim = self._coldest_but_active()
            if victim is None:
                return
            self._drop(victim)

    def _coldest_but_active(self) -> int | None:
        """Return the segment to go next, which is never the one that is written; None where there is no other."""
        return self._heat.coldest(self._sizes, keep=None if self._active is None else self._active.number)

    def _empty_coldest(self) -> None:
        """Carry over what is hot of the coldest segment, then drop that."""
        assert self._active is not None
        victim = self._coldest_but_active()
        if victim is None:
            return
        entries = self._heat.hottest(self._index.held_by(victim), tick=self._tick, room=self._segment_bytes // 4)
        with (
            contextlib.suppress(OSError),
            SegmentReader(self._segments_folder, victim, direct=self._direct) as segment,
        ):
            for name, entry in entries:
                buffer = page_buffer(record_bytes(entry.place.size))
                with contextlib.suppress(IntegrityError):
                    header, payload = segment.read(entry.place, buffer)
                    if header.name == name:
                        self._append([(header, payload)], entry.used_tick)
        self._commit()
        self._drop(victim)

    def _seal(self) -> None:
        """End the active segment, and give back what it does not need."""
        if self._active is None:
            return
        segment = self._active
        try:
            self._commit()
        finally:
            if self._active is segment:
                self._retire(segment)

    def _retire(self, segment: SegmentWriter) -> None:
        self._active = None
        segment.close()
        path = segment_path(self._segments_folder, segment.number)
        with contextlib.suppress(OSError):
            os.truncate(path, segment.used)
        self._sizes[segment.number] = path.stat().st_size if path.exists() else 0

    def _drop_coldest(self, *, keep: int | None) -> bool:
        """Give room back: what was set aside first, then the coldest segment. Return False where there is nothing."""
        aside = sorted((path for path in (self.folder / "quarantine").rglob("*") if path.is_file()), key=str)
        if aside:
            aside[0].unlink()
            return True
        victim = self._heat.coldest(self._sizes, keep=keep)
        if victim is None:
            return False
        self._drop(victim)
        return True

    def _drop(self, number: int) -> None:
        """Remove a segment: from the index first, so that it never names what is gone."""
        try:
            self._write_index(Batch(dropped=[number]))
        except lmdb.Error as error:
            self.failure = f"the index cannot be written ({error})"
            raise

    # --- commits ----------------------------------------------------------------------------------------------------

    def _write_index(self, batch: Batch) -> None:
        """Change the index, and remove the segments that are dropped; see Note [A full disk]."""
        for left in reversed(range(_TRIES)):
            held = {number: self._index.held_by(number) for number in batch.dropped if number in self._sizes}
            try:
                self._index.commit(batch)
                break
            except lmdb.Error as error:
                if not (left and is_full(error, self.folder) and self._unlink_for_room(batch)):
                    raise
        for number, entries in held.items():
            self._note_dropped(number, entries)

    def _unlink_for_room(self, batch: Batch) -> bool:
        """Remove the files of what the batch drops, or else let it drop the coldest; return whether one is gone."""
        there = [number for number in batch.dropped if number in self._sizes]
        if not there:
            victim = self._coldest_but_active()
            if victim is None:
                return False
            batch.dropped.append(victim)
            there = [victim]
        for number in there:
            entries = self._index.held_by(number)
            with self._lock:
                self._bad |= {name: entry.place for name, entry in entries}  # the index names them still
            self._note_dropped(number, entries)
        return True

    def _note_dropped(self, number: int, entries: list[tuple[bytes, Entry]]) -> None:
        with self._lock:
            self._sizes.pop(number, None)
            for name in [name for name, entry in self._uses.items() if entry.place.segment == number]:
                del self._uses[name]
        self.evicted += len(entries)
        self._heat.drop(number, entries)
        segment_path(self._segments_folder, number).unlink(missing_ok=True)

    def _commit(self) -> None:
        """Make the batch durable; see the notes. The caller holds ``_writing``."""
        self._empty_index()
        with self._lock:
            batch, self._batch = self._batch, Batch()
            self._committing = batch
            uses, self._uses = self._uses, {}
            came, self._came = self._came, []
            self._pending_bytes = 0
        if not (batch.puts or batch.forgets or batch.realms or uses):
            return
        try:
            if self._active is not None:
                if batch.puts:
                    self._active.sync()
                # Of a new segment without blocks too: a start removes those below `next_segment` that are not named.
                batch.segments[self._active.number] = self._active.used
            batch.meta = {"tick": self._tick, "next_segment": self._next_segment}
            self._write_index(dataclasses.replace(batch, puts={**uses, **batch.puts}))
            now = time.monotonic()
            with self._lock:
                self._delays.extend(now - one for one in came)
        except (OSError, lmdb.Error) as error:
            self._lose(batch, error)
            raise
        finally:
            with self._lock:
                self._committing = Batch()

    def _lose(self, batch: Batch, error: Exception) -> None:
        """Give up what could not be made durable."""
        self.lost += len(batch.puts)
        for entry in batch.puts.values():
            self._heat.remove(entry)
        if isinstance(error, lmdb.Error):
            self.failure = f"the index cannot be written ({error})"
        if self._active is not None:
            self._retire(self._active)

    def _commit_in_time(self, seconds: float) -> None:
        """Commit what is pending so long after the first of it came; in a thread of its own.

        Where blocks come faster than they are appended, all of them are late: commits then leave time for stores.
        """
        ended = -math.inf
        while not self._is_closed:
            self._wake.wait()
            self._wake.clear()
            if self._is_closed:
                return
            with self._lock:
                first = min(self._came, default=time.monotonic())
            self._closing.wait(max(0.0, max(first + seconds, ended + seconds / 2) - time.monotonic()))
            with contextlib.suppress(StoreError):  # counted in `lost`
                self.commit()
            ended = time.monotonic()

    # --- reads ------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Nobody else makes an index while this process has the lock."""

    def _open_index(self) -> Index:
        """Bring the store in order; what a reader finds is proven then."""
        old = newest_index(self.folder)
        data = None if old is None else old / "data.mdb"
        size = data.stat().st_size if data is not None and data.exists() else 0
        # An index of a larger quota must be read before it can shrink.
        found = recover(self.folder, self.identity, map_size=max(self._map_size, 2 * size))
        self.recovered = found
        self._sizes, self._tick, self._next_segment = found.segments, found.tick, found.next_segment
        for _, entry in found.index.entries():
            self._heat.add(entry)
        return found.index

    def _give_up(self, name: bytes, entry: Entry, error: Exception) -> None:
        with self._lock:
            if self._bad.get(name) == entry.place:
                return
            super()._give_up(name, entry, error)
            self._uses.pop(name, None)
            if self._batch.puts.pop(name, None) is None:
                self._batch.forgets[name] = (entry.place, str(error))
            self._heat.remove(entry)
            self._wake.set()

    def _note_use(self, name: bytes, entry: Entry) -> None:
        with self._lock:
            # A segment that is being dropped must not come back into the index.
            if entry.place.segment not in self._sizes or name in self._bad:
                return
            pending = self._batch.puts.get(name)
            before = pending or self._uses.get(name) or entry
            after = before._replace(used_tick=self._next_tick())
            if pending is not None:
                self._batch.puts[name] = after
            elif name not in self._committing.puts:
                self._uses[name] = after
            else:
                return
            self._heat.remove(before)
            self._heat.add(after)

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


def _header(record: Record) -> Header:
    size = len(record.payload)
    stored = (record.block_bytes or size, record.codec, time.time())
    return Header(0, 0, record.realm, record.name, size, *stored)
