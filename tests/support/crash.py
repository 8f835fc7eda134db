"""Power cuts without a power switch: a journal of what a process did to its files, played again up to any moment.

What had not been synchronised at that moment may be there, in part or not at all, in any order: a write may be dropped
or torn between sectors, a name that was made, changed or removed may not be yet. What had been is there. That is what
POSIX promises, and less than filesystems do.
"""

from __future__ import annotations

import dataclasses
import os
import random
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Record", "build_shim", "lose_page", "moments", "play", "play_whole", "read_journal"]

_RECORD = struct.Struct("<cHHIQ")
_SECTOR = 512
_PAGE = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One call: what it did (see crash_shim.c), to which path."""

    op: str
    path: str
    other: str
    offset: int
    data: bytes


@dataclasses.dataclass(slots=True)
class _File:
    durable: bytearray = dataclasses.field(default_factory=bytearray)
    pending: list[Record] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _Folder:
    now: dict[str, _File | _Folder] = dataclasses.field(default_factory=dict)
    durable: dict[str, _File | _Folder] = dataclasses.field(default_factory=dict)
    pending: list[list[tuple[str, _File | _Folder | None]]] = dataclasses.field(default_factory=list)

    def change(self, *changes: tuple[str, _File | _Folder | None]) -> None:
        """Give names to nodes, or take them away, all at once."""
        self.pending.append(list(changes))
        _apply(self.now, changes)


def build_shim(folder: Path) -> Path:
    """Compile crash_shim.c and return the library."""
    source, library = Path(__file__).with_name("crash_shim.c"), folder / "crash_shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    return library


def read_journal(path: Path, root: Path) -> list[Record]:
    """Return what happened below a folder, in order; paths are relative to it.

    The last record of a process that was killed may be cut short: of its call nobody learnt, so it may be left out.
    """
    data, at, records = path.read_bytes(), 0, []
    while at + _RECORD.size <= len(data):
        op, first, second, length, offset = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if at + first + second + length > len(data):
            break
        parts = []
        for size in (first, second, length):
            parts.append(data[at : at + size])
            at += size
        names = [os.path.relpath(os.fsdecode(part), root) if part else "" for part in parts[:2]]
        records.append(Record(op.decode(), names[0], names[1], offset, parts[2]))
    return records


def play(records: list[Record], end: int, place: Path, chance: random.Random, *, before: Path | None = None) -> bytes:
    """Make below ``place`` what a power cut after ``end`` calls may leave; return all that was written to ``ack``.

    What is in the folder ``before`` was there, and durable, when the records began.
    """
    root = _Folder() if before is None else _there(before)
    acks = b""
    for record in records[:end]:
        if record.path == "ack":
            acks += record.data
        else:
            _do(root, record)
    _cut(root, place, chance)
    return acks


def play_whole(records: list[Record], place: Path) -> None:
    """Make below ``place`` what is there without a power cut: were it not the same, the journal would lack calls."""
    root = _Folder()
    for record in records:
        _do(root, record)
    _leave(root, place)


def _there(place: Path) -> _Folder:
    """Return what is in a folder, all of it durable."""
    found: dict[str, _File | _Folder] = {
        path.name: _there(path) if path.is_dir() else _File(bytearray(path.read_bytes())) for path in place.iterdir()
    }
    return _Folder(found, dict(found))


def _leave(folder: _Folder, place: Path) -> None:
    place.mkdir(mode=0o700, exist_ok=True)
    for name, node in folder.now.items():
        if isinstance(node, _Folder):
            _leave(node, place / name)
        else:
            _sync(node)
            (place / name).write_bytes(node.durable)


def lose_page(records: list[Record], number: int, chance: random.Random) -> list[Record]:
    """Return the records without one of the pages that a write wrote, as of a disk that said it has it."""
    write = records[number]
    lost = chance.randrange(max(len(write.data) // _PAGE, 1)) * _PAGE
    end = lost + _PAGE
    before = dataclasses.replace(write, data=write.data[:lost])
    behind = dataclasses.replace(write, offset=write.offset + end, data=write.data[end:])
    return [*records[:number], *(part for part in (before, behind) if part.data), *records[number + 1 :]]


def _do(root: _Folder, record: Record) -> None:
    folder, name = _parent(root, record.path)
    node = folder.now.get(name) if name else folder
    if record.op == "c":
        folder.change((name, _File()))
    elif record.op == "d":
        folder.change((name, _Folder()))
    elif record.op == "u":
        folder.change((name, None))
    elif record.op == "r":
        _rename(root, folder, name, record.other)
    elif record.op == "f" and node is not None:
        _sync(node)
    elif isinstance(node, _File):
        if record.op == "W":
            _write(node.durable, record)
        else:
            node.pending.append(record)


def _rename(root: _Folder, folder: _Folder, name: str, other: str) -> None:
    target, new = _parent(root, other)
    node = folder.now[name]
    if target is folder:
        folder.change((name, None), (new, node))
    else:
        target.change((new, node))
        folder.change((name, None))


def _sync(node: _File | _Folder) -> None:
    """Make durable what is pending."""
    if isinstance(node, _Folder):
        for changes in node.pending:
            _apply(node.durable, changes)
    else:
        for write in node.pending:
            _write(node.durable, write)
    node.pending.clear()


def _cut(folder: _Folder, place: Path, chance: random.Random) -> None:
    """Write what is left of a folder."""
    place.mkdir(mode=0o700, exist_ok=True)
    left = dict(folder.durable)
    for changes in folder.pending[: chance.randint(0, len(folder.pending))]:
        _apply(left, changes)
    for name, node in left.items():
        if isinstance(node, _Folder):
            _cut(node, place / name, chance)
            continue
        data = bytearray(node.durable)
        kept = [write for write in node.pending if chance.random() < 0.7]
        chance.shuffle(kept)
        for write in kept:
            _write(data, write if chance.random() < 0.7 else _tear(write, chance))
        (place / name).write_bytes(data)
        (place / name).chmod(0o600)


def _tear(write: Record, chance: random.Random) -> Record:
    sectors = len(write.data) // _SECTOR
    if sectors < 2:
        return write
    first = chance.randrange(sectors)
    last = chance.randint(first, sectors)
    return dataclasses.replace(
        write, offset=write.offset + first * _SECTOR, data=write.data[first * _SECTOR : last * _SECTOR]
    )


def _write(data: bytearray, record: Record) -> None:
    if record.op == "s":
        del data[record.offset :]
    end = record.offset + len(record.data)
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    if record.data:
        data[record.offset : end] = record.data


def _parent(root: _Folder, path: str) -> tuple[_Folder, str]:
    """Return the folder that a path's last name is in; a path "." is the root itself."""
    *folders, name = path.split("/")
    for each in folders:
        node = root.now.setdefault(each, _Folder())
        assert isinstance(node, _Folder), path
        root = node
    return root, "" if name == "." else name


def _apply(names: dict[str, _File | _Folder], changes: Iterable[tuple[str, _File | _Folder | None]]) -> None:
    for name, node in changes:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def moments(records: list[Record], chance: random.Random, count: int) -> Iterator[int]:
    """Yield moments: half of them anywhere, half right after a call that makes something durable."""
    durable = [number + 1 for number, record in enumerate(records) if record.op in "fWr"]
    for _ in range(count):
        yield chance.randint(0, len(records)) if chance.random() < 0.5 else chance.choice(durable)
