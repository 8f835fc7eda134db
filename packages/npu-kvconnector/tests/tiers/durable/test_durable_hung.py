"""A disk that never answers: the engine goes on, nothing waits for ever, and what had been stored is whole."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import sys
import threading
import time

# vLLM infers a device as soon as it is imported; these tests run in an environment without a platform plugin.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("obstore")

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import npu_kvconnector.spec  # noqa: F401  # registers the tier
from npu_kvconnector.config import GuardConfig
from npu_kvconnector.errors import OptionError, StoreError
from npu_kvconnector.secret_file import read_secret
from npu_kvconnector.tiers.breaker import BreakerState
from npu_kvconnector.tiers.durable import manager, reader, segments, store
from npu_kvconnector.tiers.durable.lock import StoreBusyError, lock_store
from npu_kvconnector.tiers.durable.manager import DurableTierManager
from npu_kvconnector.tiers.durable.store import DurableStore
from npu_kvconnector.tiers.guard import GuardedTier
from tests.support.offloading import offloading_config
from tests.support.remote_tier import BLOCK, CHUNKS, block_of, job_of, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

QUICK = GuardConfig(load_seconds=0.2, store_seconds=0.2, failures=2, open_seconds=0.2, pending_share=0.25)


class Disk:
    """Calls that hang while they are told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.hanging = 0

    def slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **more: Any) -> Any:
            self.hanging += not self.answers.is_set()
            self.answers.wait(60)
            return call(*arguments, **more)

        return wait


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    for name in ("write_at", "read_at"):
        monkeypatch.setattr(segments, name, disk.slow(getattr(segments, name)))
    yield disk
    disk.answers.set()


class Engine:
    """The scheduler's steps, with a durable tier behind its guard."""

    def __init__(self, folder: Path, **more: object) -> None:
        self.memory = np.zeros((CHUNKS, BLOCK), np.uint8)
        for number in range(CHUNKS):
            self.memory[number] = np.frombuffer(block_of(number), np.uint8)
        spec = CPUOffloadingSpec(offloading_config(block_bytes=BLOCK))
        options = {"type": "durable", "bytes": "16MiB", "revision": "r", "path": str(folder)} | more
        self.tier = SecondaryTierFactory.create_secondary_tier(options, memoryview(self.memory), spec)
        assert isinstance(self.tier, DurableTierManager)
        self.tier.silent_seconds = 0.5  # from now on: beside other tests a start may take longer
        self.guard = GuardedTier(self.tier, QUICK, label="1:durable", num_chunks=CHUNKS, blocks_per_chunk=1)
        self.request = ReqContext(req_id="request")
        self._jobs = 0

    def submit(self, *numbers: int, is_load: bool = False) -> None:
        self._jobs += 1
        job = job_of(self._jobs, numbers, self.request, is_promotion=is_load)
        (self.guard.submit_load if is_load else self.guard.submit_store)(job)

    def steps_until(self, is_done: Callable[[], bool]) -> None:
        until = time.monotonic() + 30
        while not is_done():
            assert time.monotonic() < until
            began = time.monotonic()
            list(self.guard.get_finished_jobs())
            assert time.monotonic() - began < 1.0
            time.sleep(0.005)

    def finds(self, number: int) -> bool:
        return self.guard.lookup(key_of(number), self.request) is LookupResult.HIT


@pytest.fixture
def engine(disk: Disk, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "store")
    engine.submit(*range(8))
    engine.steps_until(lambda: not engine.guard._jobs)
    yield engine
    disk.answers.set()
    if not engine.tier._is_shut:  # one that was given up closes its store by itself, once the disk answers
        engine.tier.shutdown()


def test_stores_that_hang_open_the_breaker_and_take_no_more_than_their_share(engine: Engine, disk: Disk) -> None:
    disk.answers.clear()
    given = 0
    for number in range(10, CHUNKS):
        if engine.guard.accepts(1):
            engine.submit(number)
            given += 1
    assert given <= CHUNKS // 4
    engine.steps_until(lambda: engine.guard.stores.state is BreakerState.OPEN)
    for _ in range(5000):
        engine.guard.touch([key_of(1)], engine.request)
    assert engine.tier._touches <= 1024
    assert engine.finds(1)  # what is there is there
    disk.answers.set()
    engine.steps_until(lambda: not engine.guard._jobs)
    engine.steps_until(engine.guard.stores.allows)
    engine.submit(60)
    engine.steps_until(lambda: not engine.guard._jobs)
    assert engine.guard.stores.state is BreakerState.CLOSED
    assert engine.finds(60)


def test_loads_that_hang_are_misses_and_leave_most_of_the_host_tier(engine: Engine, disk: Disk) -> None:
    """However long it lasts: each try keeps its chunks until it ends, since it may still write there."""
    disk.answers.clear()
    tries = 0
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        if all(job.is_overdue for job in engine.guard._jobs.values()) and engine.finds(tries % 8):
            engine.submit(tries % 8, 20 + tries % 8, 30 + tries % 8, 40 + tries % 8, is_load=True)
            tries += 1
        list(engine.guard.get_finished_jobs())
        engine.guard._failed.clear()
        engine.guard.loads._open_until = 0.0  # a day in four seconds
        time.sleep(0.005)
    held = sum(len(job.keys) for job in engine.guard._jobs.values())
    assert tries > 2
    assert held < CHUNKS // 2
    assert not engine.finds(1)
    disk.answers.set()
    engine.steps_until(lambda: not engine.guard._jobs)
    assert engine.guard._late_chunks == 0
    engine.guard._failed.clear()
    engine.steps_until(lambda: engine.finds(1))


@pytest.mark.parametrize("is_load", [False, True])
def test_nobody_waits_for_ever(is_load: bool, engine: Engine, disk: Disk, tmp_path: Path) -> None:
    disk.answers.clear()
    engine.submit(*((1, 2) if is_load else (11, 12)), is_load=is_load)
    while not disk.hanging:
        time.sleep(0.005)
    began = time.monotonic()
    with pytest.raises(StoreError, match="has not answered for"):
        engine.tier.drain_jobs()
    with pytest.raises(StoreError, match="has not answered for"):
        engine.tier.shutdown()
    engine.tier.shutdown()  # again: nothing
    assert time.monotonic() - began < 10
    disk.answers.set()
    engine.steps_until(lambda: not engine.guard._jobs)


ENDS = """
import os, sys, threading, time
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
from pathlib import Path
from npu_kvconnector.errors import StoreError
from npu_kvconnector.tiers.durable import segments
sys.path.insert(0, sys.argv[2])
from test_durable_hung import Engine
engine = Engine(Path(sys.argv[1]))
engine.tier.silent_seconds = 0.5
engine.submit(1, 2)
engine.steps_until(lambda: not engine.guard._jobs)
segments.write_at = lambda *_: threading.Event().wait()
engine.submit(3)
time.sleep(0.2)
try:
    engine.tier.shutdown()
except StoreError as error:
    print("GIVEN UP", error)
"""


def test_the_process_ends_and_what_was_stored_before_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store"), str(os.path.dirname(__file__))]  # noqa: PTH120
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "GIVEN UP the disk of" in done.stdout
    store = DurableStore(tmp_path / "store", quota=16 * 2**20, block_bytes=BLOCK)
    assert len(store.index) == 2
    store.close()


class HungFile:
    """The file that each start reads, as one whose reading does not return: a FIFO that nobody writes to."""

    def __init__(self, folder: Path) -> None:
        self._file, self._fifo = folder / "store.json", folder.parent / "fifo"
        self._content = self._file.read_bytes()
        self._file.unlink()
        os.mkfifo(self._fifo)
        os.link(self._fifo, self._file)

    def answer(self, content: bytes | None = None) -> None:
        """Let the call return, with what was in the file, and further ones too."""
        if content is None:
            whole = self._file.with_name(".whole")
            whole.write_bytes(self._content)
            whole.replace(self._file)
        until = time.monotonic() + (1.0 if content is None else 30.0)  # of further ones none may hang
        while time.monotonic() < until:
            with contextlib.suppress(OSError):  # nobody reads
                descriptor = os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, self._content if content is None else content)
                os.close(descriptor)
                return
            time.sleep(0.01)
        assert content is None, "nobody reads"


def stored_before(folder: Path, *numbers: int) -> None:
    engine = Engine(folder)
    engine.submit(*numbers)
    engine.steps_until(lambda: not engine.guard._jobs)
    engine.tier.shutdown()


@pytest.fixture
def hung(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HungFile:
    stored_before(tmp_path / "store", 1, 2)
    monkeypatch.setattr(DurableTierManager, "silent_seconds", 0.5)
    return HungFile(tmp_path / "store")


def can_be_locked(folder: Path) -> bool:
    try:
        os.close(lock_store(folder))
    except StoreBusyError:
        return False
    return True


def test_a_start_goes_on_without_the_tier_which_is_used_once_the_disk_answers(
    hung: HungFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(manager.logger, "warning", lambda text, *values: said.append(text % values))
    began = time.monotonic()
    engine = Engine(tmp_path / "store")
    assert time.monotonic() - began < 5
    assert "has not answered for 0 s" in said[0]
    assert "starts without the durable tier" in said[0]
    assert not engine.finds(1)
    while engine.guard.accepts(1):
        engine.submit(5)
        engine.steps_until(lambda: not engine.guard._jobs)
    assert engine.guard.stores.state is BreakerState.OPEN
    engine.guard.touch([key_of(1)], engine.request)
    stats = engine.tier.get_stats()
    assert stats is not None
    assert stats._values["vllm:npu_kv_durable_is_writer"] == {(): 0.0}
    engine.tier.drain_jobs()
    hung.answer()
    engine.steps_until(lambda: engine.finds(1))
    engine.submit(2, is_load=True)
    engine.steps_until(lambda: not engine.guard._jobs)
    engine.steps_until(engine.guard.stores.allows)
    engine.submit(6)
    engine.steps_until(lambda: engine.finds(6))
    assert "the durable tier is used now" in said[-1]
    engine.tier.shutdown()


@pytest.mark.parametrize("call", ["make_folder", "write_whole"])
def test_a_start_on_a_full_disk_goes_on_without_the_tier_until_there_is_room(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = threading.Event()
    real = getattr(store, call)

    def with_room(*arguments: Any, **more: Any) -> Any:
        if not room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **more)

    monkeypatch.setattr(store, call, with_room)
    monkeypatch.setattr(manager, "_TRY_AGAIN", 0.05)
    said: list[str] = []
    monkeypatch.setattr(manager.logger, "warning", lambda text, *values: said.append(text % values))
    engine = Engine(tmp_path / "store")
    assert not engine.finds(1)
    engine.steps_until(lambda: bool(said))
    time.sleep(0.3)  # several times
    assert len(said) == 1
    assert "tries again" in said[0]
    assert "make room on that disk" in said[0]
    room.set()
    engine.steps_until(lambda: len(said) > 1)
    assert "the durable tier is used now" in said[1]
    engine.steps_until(engine.guard.stores.allows)
    engine.submit(1)
    engine.steps_until(lambda: engine.finds(1))
    engine.tier.shutdown()


def test_a_store_that_cannot_be_opened_late_is_tried_again(
    hung: HungFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "_TRY_AGAIN", 0.05)
    said: list[str] = []
    monkeypatch.setattr(manager.logger, "warning", lambda text, *values: said.append(text % values))
    engine = Engine(tmp_path / "store")
    hung.answer(b"not JSON")
    engine.steps_until(lambda: len(said) > 1)
    assert "tries again" in said[1]
    assert "holds no store" in said[1]
    hung.answer()
    engine.steps_until(lambda: engine.finds(1))
    engine.tier.shutdown()


def test_a_server_that_ends_before_the_disk_answers_leaves_the_store_to_others(hung: HungFile, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store")
    began = time.monotonic()
    engine.tier.shutdown()
    assert time.monotonic() - began < 1
    assert not can_be_locked(tmp_path / "store")
    hung.answer()
    engine.steps_until(lambda: can_be_locked(tmp_path / "store"))


def test_what_is_wrong_is_said_at_the_start_where_the_disk_says_it_in_time(
    hung: HungFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DurableTierManager, "silent_seconds", 60.0)
    later = threading.Timer(0.1, hung.answer, [b"not JSON"])
    later.start()
    with pytest.raises(StoreError, match="holds no store"):
        Engine(tmp_path / "store")
    later.join()
    assert can_be_locked(tmp_path / "store")


def test_a_secret_on_a_disk_that_hangs_is_refused_before_the_store_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "read_secret", functools.partial(read_secret, seconds=0.2))
    secret = tmp_path / "secret"
    os.mkfifo(secret, 0o600)
    with pytest.raises(OptionError, match=f"secret_file={secret} was not read"):
        Engine(tmp_path / "store", secret_file=str(secret))
    assert not (tmp_path / "store").exists()
    secret.write_bytes(b"")  # lets the thread end


STARTS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_durable_hung import DurableTierManager, Engine
DurableTierManager.silent_seconds = 0.5
print("STARTED", Engine(Path(sys.argv[1])).finds(1))
"""


def test_a_process_ends_whose_start_hung(hung: HungFile, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS, str(tmp_path / "store"), str(os.path.dirname(__file__))]  # noqa: PTH120
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "STARTED False" in done.stdout


WRITES = """
import sys
from pathlib import Path
from npu_kvconnector.tiers.durable.store import DurableStore
store = DurableStore(Path(sys.argv[1]), quota=16 * 2**20, block_bytes=4096)
store.put(bytes.fromhex(sys.argv[2]), bytes(16), memoryview(bytes(4096)))
store.close()
"""


def test_who_reads_follows_the_writer_and_no_question_waits_for_the_disk(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "LOOK_AGAIN", 0.05)
    stored_before(tmp_path / "store", 1)
    lock = lock_store(tmp_path / "store")  # as another process that writes
    engine = Engine(tmp_path / "store")
    assert engine.finds(1)
    disk.answers.clear()
    monkeypatch.setattr(reader, "newest_index", disk.slow(reader.newest_index))
    engine.steps_until(lambda: disk.hanging > 0)
    os.close(lock)
    name = engine.tier._realm.name(key_of(3)).hex()
    command = [sys.executable, "-c", WRITES, str(tmp_path / "store"), name]
    subprocess.run(command, timeout=120, check=True)  # makes a new index
    began = time.monotonic()
    assert engine.finds(1)
    assert not engine.finds(3)
    assert time.monotonic() - began < 1
    disk.answers.set()
    engine.steps_until(lambda: engine.finds(3))
    engine.tier.shutdown()
