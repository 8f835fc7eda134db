"""Fails a writer's n-th system call on its store, for one n after the other, and checks what it left.

``python -m tests.support.call_faults ROOT FIRST LAST STEP EVERY``, with crash_shim.c preloaded and CRASH_ROOT=ROOT. For each
n of that range and each kind of fault a fork of this process stores blocks; its n-th call fails, and every so many after
it. A torn write is the writer's last. The last line of the output is JSON: see :class:`Found`.

The proof of an index is a fork too, instead of a fresh interpreter: that takes a tenth of the time, and its calls fail
as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

from npu_kvconnector.commands.stress import block_of, name_of
from npu_kvconnector.errors import OptionError, StoreError
from npu_kvconnector.tiers.durable import probe
from npu_kvconnector.tiers.durable.store import DurableStore

__all__ = ["KINDS", "Found"]

KINDS = {"ENOSPC": 1, "EIO": 2, "short": 3, "torn": 4}
"""As crash_shim.c numbers them."""
_BLOCKS = 40
_QUOTAS = (12 * 2**20, 6 * 2**20 - 2**18)  # for all blocks, and one by which blocks go
_REALM = b"faults by number"
_OK, _WRONG, _RAISED = 0, 3, 4


@dataclasses.dataclass
class Found:
    """What became of the runs."""

    runs: int = 0
    faults: int = 0
    checked: int = 0
    """Blocks that were read after a run and compared."""
    wrong: int = 0
    missing: int = 0
    """Blocks that had been reported durable, in a store that holds all, and are gone."""
    ended: list[str] = dataclasses.field(default_factory=list)
    """Runs that raised, or ended by a signal other than a torn write's."""


def main(root: Path, numbers: range, every: int) -> Found:
    """Run every kind of fault at every number of call."""
    found = Found()
    for number in numbers:
        for kind in KINDS:
            one_run(root / f"run-{number}-{kind}", kind, number, every, found)
    return found


def prove_in_fork(*arguments: str) -> int:
    """Return the probe's exit code, of a fork of this process."""
    child = os.fork()
    if child == 0:
        code = _RAISED
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = probe.main(list(arguments))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def one_run(folder: Path, kind: str, number: int, every: int, found: Found) -> None:
    """Let a fork store blocks with faults, then read what it left."""
    folder.mkdir()
    notes = os.open(folder / "ack", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    child = os.fork()
    if child == 0:
        store_with_faults(folder / "store", notes, kind, number, every)
    os.close(notes)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    durable, struck = read_notes(folder / "ack")
    was_torn = kind == "torn" and code == -signal.SIGKILL
    if code not in {_OK, _WRONG} and not was_torn:
        found.ended.append(f"{kind} at call {number}: {code}")
    found.runs += 1
    found.faults += was_torn or struck
    found.wrong += code == _WRONG
    check(folder / "store", durable if number % 2 == 0 else set(), found)
    shutil.rmtree(folder)


def store_with_faults(folder: Path, notes: int, kind: str, number: int, every: int) -> None:
    """Store blocks, note which are durable, and never return."""
    shim = ctypes.CDLL(None)
    code = _RAISED
    try:
        shim.crash_arm(KINDS[kind], ctypes.c_long(number), ctypes.c_long(every))
        code = _OK if store_blocks(folder, notes, number) else _WRONG
        os.write(notes, b"struck %d\n" % shim.crash_struck())
    except BaseException:  # noqa: BLE001  # a fork must not go on with its parent's work
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def store_blocks(folder: Path, notes: int, seed: int) -> bool:
    """Return whether every block that was read was what had been stored; note in a file what is durable."""
    chance, quota = random.Random(seed), _QUOTAS[seed % 2]
    store, pending = open_store(folder, quota), set[int]()
    for number in range(_BLOCKS):
        if store is not None and store.failure is not None:
            store.abandon()
            store, pending = open_store(folder, quota), set()
        if store is None:  # the server goes on without
            return True
        lost, evicted = store.lost, store.evicted
        try:
            if store.put(name_of(number), _REALM, memoryview(block_of(number))):
                pending.add(number)
            if chance.random() < 0.25:
                store.commit()
                for each in pending if store.lost == lost else ():
                    os.write(notes, b"+%d\n" % each)
                pending = set()
        except StoreError:
            pending = set()
        if store.evicted > evicted:
            pending -= note_evicted(store, notes, number + 1)
        if not read_one(store, notes, chance.randrange(number + 1), pending):
            return False
    close(store, notes)
    return True


def close(store: DurableStore, notes: int) -> None:
    """Close a store; where that costs blocks, note all as gone: it names none any more."""
    evicted = store.evicted
    store.close()
    if store.evicted > evicted:
        note_evicted(store, notes, _BLOCKS)


def read_one(store: DurableStore, notes: int, number: int, pending: set[int]) -> bool:
    """Return whether a block is what had been stored, or is not there; a read that failed gives it up."""
    read = store.read(name_of(number))
    if read is None:
        pending.discard(number)
        os.write(notes, b"-%d\n" % number)
    return read is None or bytes(read.payload) == block_of(number)


def note_evicted(store: DurableStore, notes: int, blocks: int) -> set[int]:
    """Note, and return, what a full disk made the store do without."""
    gone = {number for number in range(blocks) if name_of(number) not in store}
    os.write(notes, b"".join(b"-%d\n" % number for number in gone))
    return gone


def open_store(folder: Path, quota: int) -> DurableStore | None:
    """Open a store on a disk that fails now and then; None if it fails each time."""
    for _ in range(3):
        with contextlib.suppress(StoreError, OptionError):
            return DurableStore(folder, quota=quota, block_bytes=100_000, commit_seconds=0)
    return None


def read_notes(path: Path) -> tuple[set[int], int]:
    """Return the blocks that are durable, and how many calls were failed."""
    durable, struck = set[int](), 0
    for line in path.read_text().splitlines():
        if line.startswith("struck"):
            struck = int(line.split()[1])
        else:
            (durable.add if line[0] == "+" else durable.discard)(int(line[1:]))
    return durable, struck


def check(folder: Path, durable: set[int], found: Found) -> None:
    """Open the store as a server does, and compare every block in it."""
    store = DurableStore(folder, quota=_QUOTAS[0], block_bytes=100_000, commit_seconds=0)
    for number in range(_BLOCKS):
        read = store.read(name_of(number))
        if read is not None:
            found.checked += 1
            found.wrong += bytes(read.payload) != block_of(number)
        elif number in durable:
            found.missing += 1
    store.close()


if __name__ == "__main__":
    probe._run = prove_in_fork
    *numbers, period = (int(argument) for argument in sys.argv[2:])
    print(json.dumps(dataclasses.asdict(main(Path(sys.argv[1]), range(*numbers), period))))
