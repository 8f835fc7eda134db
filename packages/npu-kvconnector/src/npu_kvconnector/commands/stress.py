"""`npu-kv stress`: kills a process that writes a store, again and again, and checks what it left.

The writer stores blocks that follow from their numbers, so that each byte can be checked later, and acknowledges those
that are durable. After a kill nothing that is read may differ, and nothing acknowledged may be missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from npu_kvconnector.errors import OptionError, StoreError
from npu_kvconnector.tiers.durable.lock import StoreBusyError
from npu_kvconnector.tiers.durable.store import DurableStore

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Outcome", "block_of", "check", "name_of", "stress", "write"]

_REALM = b"npu-kv stress   "
_SIZES = (4096, 10_000, 100_000)
_BLOCK_BYTES = max(_SIZES)
_LONGEST_LIFE = 0.5  # seconds that a writer has,
_WRITING = 0.8  # most of them after they have acknowledged a block, the others from their start, in recovery
_LOCK_SECONDS = 30.0
_WRONG = 3  # the exit code of a writer that has read a wrong byte


@dataclasses.dataclass(slots=True)
class Outcome:
    """What was found, summed over rounds."""

    rounds: int = 0
    checked: int = 0
    """Blocks that were read and compared."""
    wrong: int = 0
    """Blocks that were not what was stored."""
    missing: int = 0
    """Blocks that were acknowledged as durable and are gone."""
    adopted: int = 0
    """Blocks found behind the index."""
    rebuilt: int = 0
    """Rounds after which the index had to be made again."""

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        return not self.wrong and not self.missing


def name_of(number: int) -> bytes:
    """Return the name of a block."""
    return number.to_bytes(32, "big")


def block_of(number: int) -> bytes:
    """Return the bytes of a block."""
    return random.Random(number).randbytes(_SIZES[number % len(_SIZES)])  # noqa: S311  # repeatable, not secret


def write(folder: Path, ack: Path, *, quota: int, seed: int, blocks: int) -> None:
    """Store blocks from where the last run ended, and note in ``ack`` up to which they are durable."""
    chance = random.Random(seed)  # noqa: S311
    with ack.open("ab", buffering=0) as notes:
        number = acknowledged(ack)
        store = _open_at_last(folder, quota)
        for _ in range(blocks):
            if store.failure is not None:
                store.close()
                store = _open_at_last(folder, quota)
            with contextlib.suppress(StoreError):
                store.put(name_of(number), _REALM, memoryview(block_of(number)))
            number += 1
            other = chance.randrange(number)
            read = store.read(name_of(other))
            if read is not None and bytes(read.payload) != block_of(other):
                sys.exit(_WRONG)
            if chance.random() < 0.2 and _commits(store):
                notes.write(b"%d\n" % number)
        store.close()


def check(folder: Path, acknowledged: int, *, quota: int, outcome: Outcome, numbers: int, evicts: bool = False) -> None:
    """Open the store as a server does, and compare every block in it.

    Args:
        folder: of the store.
        acknowledged: blocks below this number were reported durable.
        quota: of the store.
        outcome: what was found is added to it.
        numbers: blocks below this number may be there.
        evicts: whether the quota is so small that blocks go by themselves.
    """
    store = _open_after_kill(folder, quota)
    for number in range(numbers):
        read = store.read(name_of(number))
        if read is not None:
            outcome.checked += 1
            outcome.wrong += bytes(read.payload) != block_of(number)
        elif number < acknowledged and not evicts:
            outcome.missing += 1
    outcome.rounds += 1
    outcome.adopted += store.recovered.adopted
    outcome.rebuilt += store.recovered.was_rebuilt
    store.close()


def acknowledged(ack: Path) -> int:
    """Return the last number in the file of acknowledgements; a line that is cut short does not count."""
    if not ack.exists():
        return 0
    lines = ack.read_bytes().split(b"\n")[:-1]
    return int(lines[-1]) if lines else 0


def stress(folder: Path, *, rounds: int, seed: int, quota: int = 2**28) -> Iterator[Outcome]:
    """Kill a writer ``rounds`` times at random moments; yield what was found so far after each.

    Raises:
        OptionError: the folder is there already; what is in it is not touched.
    """
    if folder.exists():
        msg = f"{folder} is there already: stress makes and removes a folder of its own"
        raise OptionError(msg)
    folder.mkdir(parents=True, mode=0o700)
    chance, outcome, ack = random.Random(seed), Outcome(), folder / "ack"  # noqa: S311
    processes = multiprocessing.get_context("forkserver")  # which starts a writer in milliseconds
    processes.set_forkserver_preload(["__main__", __name__])
    try:
        for number in range(rounds):
            options = {"quota": quota, "seed": seed + number, "blocks": 1_000_000}
            writer = processes.Process(target=write, args=(folder / "store", ack), kwargs=options, daemon=True)
            writer.start()
            try:
                if chance.random() < _WRITING:
                    _wait_for_more(ack, acknowledged(ack))
                time.sleep(chance.uniform(0.0, _LONGEST_LIFE))
            finally:  # an interrupt leaves no writer either
                writer.kill()
                writer.join()
            if writer.exitcode == _WRONG:
                outcome.wrong += 1
            done = acknowledged(ack)
            check(folder / "store", done, quota=quota, outcome=outcome, numbers=done + 1000)
            yield outcome
            if done > 1000:  # begin anew, so that checks stay short
                shutil.rmtree(folder / "store")
                ack.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_more(ack: Path, before: int) -> None:
    until = time.monotonic() + 60
    while acknowledged(ack) <= before and time.monotonic() < until:
        time.sleep(0.002)


def _open(folder: Path, quota: int) -> DurableStore:
    return DurableStore(folder, quota=quota, block_bytes=_BLOCK_BYTES, commit_seconds=0.2)


def _open_after_kill(folder: Path, quota: int) -> DurableStore:
    """Open a store whose writer was killed; a process that it was about to start may hold its lock for a moment yet."""
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return _open(folder, quota)
        except StoreBusyError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def _open_at_last(folder: Path, quota: int) -> DurableStore:
    """Open a store on a disk that fails now and then."""
    for _ in range(100):
        with contextlib.suppress(StoreError, OptionError):
            return _open(folder, quota)
    sys.exit("the store could not be opened in 100 attempts")


def _commits(store: DurableStore) -> bool:
    """Return whether all that was stored is durable."""
    try:
        store.commit()
    except StoreError:
        return False
    return store.lost == 0 and store.failure is None


if __name__ == "__main__":
    write(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        quota=int(sys.argv[3]),
        seed=int(sys.argv[4]),
        blocks=int(os.fsencode(sys.argv[5])),
    )
