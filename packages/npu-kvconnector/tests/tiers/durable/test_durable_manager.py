"""The durable tier as vLLM drives it: blocks come back after a restart, whole, to those who may have them, or not at all."""

from __future__ import annotations

import errno
import logging
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
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import npu_kvconnector.spec  # noqa: F401  # registers the tier
from npu_kvconnector.config import GuardConfig
from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.durable import manager
from npu_kvconnector.tiers.durable.lock import lock_store
from npu_kvconnector.tiers.durable.manager import DurableTierManager
from npu_kvconnector.tiers.guard import GuardedTier
from tests.support.offloading import offloading_config
from tests.support.remote_tier import BLOCK, CHUNKS, Server, block_of, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BYTES = "16MiB"
QUICKER = f"""
import sys
from pathlib import Path
from npu_kvconnector.tiers.durable.store import DurableStore
store = DurableStore(Path(sys.argv[1]), quota=16 * 2**20, block_bytes={BLOCK})
print("open", flush=True)
sys.stdin.read()
store.close()
"""


class DurableServer(Server):
    """A server with a durable tier."""

    tier: DurableTierManager

    def __init__(self, options: dict[str, Any], **config: Any) -> None:
        self.memory = np.zeros((CHUNKS, BLOCK), np.uint8)
        spec = CPUOffloadingSpec(offloading_config(block_bytes=BLOCK, **config))
        tier = {"type": "durable", "bytes": BYTES, "revision": "r", **options}
        self.tier = SecondaryTierFactory.create_secondary_tier(tier, memoryview(self.memory), spec)
        self._jobs = self._requests = 0

    def counts(self) -> dict[str, float]:
        stats = self.tier.get_stats()
        assert stats is not None
        return {name.removeprefix("vllm:npu_kv_durable_"): sum(of.values()) for name, of in stats._values.items()}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(tmp_path / "store")}


@pytest.fixture
def serve(options: dict[str, Any]) -> Iterator[Callable[..., DurableServer]]:
    servers: list[DurableServer] = []

    def make(config: dict[str, Any] | None = None, **changes: Any) -> DurableServer:
        for server in servers:
            server.tier.shutdown()
        servers.append(DurableServer({**options, **changes}, **(config or {})))
        return servers[-1]

    yield make
    for server in servers:
        server.tier.shutdown()


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("a secret that is long enough")
    path.chmod(0o600)
    return str(path)


def test_blocks_come_back_after_a_restart(serve: Callable[..., DurableServer]) -> None:
    server = serve()
    assert server.lookup(1, 2) == [False, False]
    assert server.store(1, 2).success
    assert server.lookup(1, 2, 3) == [True, True, False]
    server = serve()
    assert server.lookup(1, 2, 3) == [True, True, False]
    result, blocks = server.load(1, 2)
    assert result.success
    assert result.transfer_bytes == 2 * BLOCK
    assert blocks == [block_of(1), block_of(2)]
    counts = server.counts()
    assert (counts["loaded_blocks"], counts["blocks"], counts["is_writer"]) == (2, 2, 1)


@pytest.mark.parametrize(("size", "warnings"), [(BYTES, 0), (2**50, 1)])
def test_more_bytes_than_the_disk_has_are_said(
    size: str | int, warnings: int, serve: Callable[..., DurableServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(manager.logger, "warning", lambda text, *values: said.append(text % values))
    serve(bytes=size)
    assert len([text for text in said if "has room for" in text]) == warnings


def test_what_is_not_there_fails_alone(serve: Callable[..., DurableServer]) -> None:
    server = serve()
    server.store(1)
    result, blocks = server.load(1, 2)
    assert not result.success
    assert len(result.successful_keys or ()) == 1
    assert blocks == [block_of(1), b"\xee" * BLOCK]  # nothing is written to the chunk of a block that is not there


def test_a_changed_block_is_a_miss_and_can_be_stored_again(
    serve: Callable[..., DurableServer], options: dict[str, Any], tmp_path: Path
) -> None:
    server = serve()
    server.store(1)
    server = serve()
    [segment] = (tmp_path / "store" / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[2 * 4096 + 100] ^= 4
    segment.write_bytes(data)
    result, blocks = server.load(1)
    assert not result.success
    assert blocks == [b"\xee" * BLOCK]
    assert server.counts()["corrupt_blocks"] == 1
    assert server.lookup(1) == [False]
    assert server.store(1).success
    assert server.load(1)[1] == [block_of(1)]


@pytest.mark.parametrize("change", [{"revision": "other"}, {"namespace": "other"}, "dtype", "secret_file", "encrypt"])
def test_others_blocks_are_not_there(change: Any, serve: Callable[..., DurableServer], secret: str) -> None:
    config: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    if change == "dtype":
        config = {"dtype": "float16"}
    elif isinstance(change, str):
        changes = {"secret_file": secret, "encrypt": change == "encrypt"}
    else:
        changes = change
    serve().store(1)
    server = serve(config, **changes)
    assert server.lookup(1) == [False]
    assert not server.load(1)[0].success
    assert server.store(1).success
    assert server.load(1)[1] == [block_of(1)]
    assert serve().load(1)[1] == [block_of(1)]  # beside each other


def test_encrypted_blocks_hold_nothing_readable(
    serve: Callable[..., DurableServer], secret: str, tmp_path: Path
) -> None:
    server = serve(secret_file=secret, encrypt=True)
    server.store(1, 2)
    server = serve(secret_file=secret, encrypt=True)
    assert server.load(1, 2)[1] == [block_of(1), block_of(2)]
    stored = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert block_of(1)[:16] not in stored
    assert b"a secret that is long enough" not in stored


def test_a_second_server_reads_and_takes_over(
    serve: Callable[..., DurableServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_kvconnector.tiers.durable.manager._TRY_AGAIN", 0.0)
    first = serve()
    first.store(1)
    first.tier.shutdown()
    lock = lock_store(tmp_path / "store")  # as another process that writes
    second = serve()
    assert second.lookup(1) == [True]
    assert second.load(1)[1] == [block_of(1)]
    assert not second.store(2).success
    counts = second.counts()
    assert (counts["is_writer"], counts["dropped_blocks"]) == (0, 1)
    os.close(lock)
    assert second.store(2).success
    assert second.load(1, 2)[1] == [block_of(1), block_of(2)]
    assert second.counts()["is_writer"] == 1


def test_a_reader_whose_stores_were_refused_takes_over_at_its_next_one(
    serve: Callable[..., DurableServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_kvconnector.tiers.durable.manager._TRY_AGAIN", 0.0)
    first = serve()
    first.store(1)
    first.tier.shutdown()
    lock = lock_store(tmp_path / "store")  # as another process that writes
    reader = serve()
    guard = GuardedTier(reader.tier, GuardConfig(), label="1:durable", num_chunks=CHUNKS, blocks_per_chunk=1)

    def store(number: int) -> bool:
        assert guard.accepts(1)
        guard.submit_store(reader.job([number], is_promotion=False))
        guard.drain_jobs()
        (result,) = guard.get_finished_jobs()
        return result.success

    assert not any(store(2) for _ in range(2 * GuardConfig().failures))
    os.close(lock)
    assert store(2)
    assert reader.counts()["is_writer"] == 1


def test_of_servers_that_start_together_one_waits_for_the_other(
    serve: Callable[..., DurableServer], tmp_path: Path
) -> None:
    lock = lock_store(tmp_path / "store")  # another one, which has made nothing yet
    timer = threading.Timer(0.3, os.close, [lock])
    timer.start()
    server = serve()
    timer.join()
    assert server.store(1).success
    assert server.counts()["is_writer"] == 1


def test_stores_that_pile_up_are_dropped(serve: Callable[..., DurableServer]) -> None:
    server = serve()
    with server.tier._store._writing:  # a disk that does not answer
        for number in range(CHUNKS):
            server.tier.submit_store(server.job([number], is_promotion=False))
        results = list(server.tier.get_finished_jobs())
        assert [result.success for result in results] == [False] * (CHUNKS // 4)
    server.tier.drain_jobs()
    assert len(list(server.tier.get_finished_jobs())) == CHUNKS * 3 // 4
    assert server.counts()["dropped_blocks"] == CHUNKS // 4


def test_of_a_job_that_is_too_large_the_first_blocks_are_stored(serve: Callable[..., DurableServer]) -> None:
    server = serve()
    half, most = CHUNKS // 2, CHUNKS * 3 // 4
    with server.tier._store._writing:  # a disk that does not answer
        for numbers in (range(half), range(half, CHUNKS)):
            server.tier.submit_store(server.job(list(numbers), is_promotion=False))
    server.tier.drain_jobs()
    assert [result.success for result in server.tier.get_finished_jobs()] == [True, False]
    assert server.lookup(*range(CHUNKS)) == [True] * most + [False] * (CHUNKS - most)
    assert server.counts()["dropped_blocks"] == CHUNKS - most


def test_a_job_of_any_size_is_stored_where_none_waits(serve: Callable[..., DurableServer]) -> None:
    server = serve()
    numbers = range(CHUNKS)  # all of the host's tier, more than may wait
    assert server.store(*numbers).success
    assert server.lookup(*numbers) == [True] * CHUNKS
    assert "dropped_blocks" not in server.counts()


def test_events_tell_what_was_stored(serve: Callable[..., DurableServer]) -> None:
    server = serve({"enable_kv_cache_events": True}, enable_kv_events=True)
    server.store(1, 2)
    (event,) = server.tier.take_events()
    assert (event.keys, event.medium, event.removed) == ([key_of(1), key_of(2)], Medium.STORAGE, False)
    assert not list(server.tier.take_events())
    quiet = serve({"enable_kv_cache_events": False}, enable_kv_events=True)  # nobody publishes
    quiet.store(3)
    assert not list(quiet.tier.take_events())


def test_a_store_that_failed_is_opened_again(
    serve: Callable[..., DurableServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_kvconnector.tiers.durable.manager._TRY_AGAIN", 0.0)
    server = serve()
    server.store(1)
    server.tier._store.failure = "the index cannot be written"
    assert server.counts()["is_writer"] == 0
    assert server.store(2).success
    assert server.load(1, 2)[1] == [block_of(1), block_of(2)]


def test_a_store_that_failed_and_that_another_process_took_is_read(
    serve: Callable[..., DurableServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_kvconnector.tiers.durable.manager._TRY_AGAIN", 0.0)
    server = serve()
    server.store(1)
    failed = server.tier._store
    failed.commit()
    failed.failure = "the index cannot be written"
    abandon = failed.abandon

    def abandon_to_another() -> None:
        abandon()
        command = [sys.executable, "-c", QUICKER, str(tmp_path / "store")]
        another = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert another.stdout is not None
        assert another.stdout.readline() == b"open\n"
        others.append(another)

    others: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(failed, "abandon", abandon_to_another)
    assert not server.store(2).success
    assert server.tier._store is not failed
    assert server.load(1)[1] == [block_of(1)]
    others[0].communicate()
    assert server.store(2).success
    assert server.load(1, 2)[1] == [block_of(1), block_of(2)]


def test_a_full_disk_is_said_once_with_the_way_out(
    serve: Callable[..., DurableServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    server = serve()
    monkeypatch.setattr("npu_kvconnector.tiers.durable.store.SegmentWriter", fail)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        assert [server.store(number).success for number in range(3)] == [False] * 3
    assert caplog.text.count("The durable tier cannot store") == 1
    assert "make room on that disk" in caplog.text


def test_hashes_that_collide_are_not_used(serve: Callable[..., DurableServer]) -> None:
    server = serve()
    key = make_offload_key(bytes(16), 0)
    request = ReqContext(req_id="r")
    server.tier.submit_store(TransferJob(1, [key], np.array([0]), False, request))
    assert not server.finish().success
    assert server.tier.lookup(key, request) is LookupResult.MISS


def as_beside_busy_cores(server: DurableServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores rest for as long as they may, after each block."""
    monkeypatch.setattr(server.tier, "_blocks_of_a_write", 1)
    monkeypatch.setattr(server.tier._restraint, "rest", lambda ahead: max(0.0, ahead))


@pytest.mark.parametrize("changes", [{"sync_seconds": 2.0}, {"sync_seconds": 60, "guard": {"store_seconds": 1.6}}])
def test_a_store_beside_busy_cores_rests_for_a_part_of_its_time_and_not_when_it_is_waited_for(
    changes: dict[str, Any], serve: Callable[..., DurableServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = {"guard": changes.pop("guard", {})}
    server = serve({"secondary_tiers": [{"type": "durable", **guard}]}, **changes)
    as_beside_busy_cores(server, monkeypatch)
    began = time.monotonic()
    server.store(*range(10))
    assert 0.6 < time.monotonic() - began < 1.9
    server.tier.submit_store(server.job(range(10, 20), is_promotion=False))
    began = time.monotonic()
    server.tier.drain_jobs()
    assert time.monotonic() - began < 0.5
    assert server.lookup(*range(20)) == [True] * 20


def test_what_was_handed_over_is_durable_within_sync_seconds_beside_busy_cores(
    serve: Callable[..., DurableServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the index names is what a power cut would leave: it names what fdatasync has written."""
    server = serve()  # a second, whatever the guard allows
    as_beside_busy_cores(server, monkeypatch)
    index = server.tier._store.index
    began = time.monotonic()
    for job in range(4):
        server.tier.submit_store(server.job(range(10 * job, 10 * job + 10), is_promotion=False))
    while len(index) < 40 and time.monotonic() < began + 30:
        time.sleep(0.01)
    took = time.monotonic() - began
    server.tier.drain_jobs()
    stats = server.tier.get_stats()
    assert stats is not None
    (delays,) = stats._values["vllm:npu_kv_durable_delay_seconds"].values()
    assert len(delays) == 40
    # Beside other tests the disk may need a second for itself; with the guard's 15 s it took those.
    assert max(delays) <= took + 0.1
    assert 0.3 < took < 3.0


def test_a_load_beside_busy_cores_rests_within_half_its_time_and_not_when_it_is_waited_for(
    serve: Callable[..., DurableServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve({"secondary_tiers": [{"type": "durable", "guard": {"load_seconds": 2.0}}]})
    server.store(*range(10))
    assert server.load(1)[0].success
    assert server.tier._courtesy._worked() > 0.0
    monkeypatch.setattr(server.tier._courtesy, "rest", lambda ahead: max(0.0, ahead))
    began = time.monotonic()
    result, blocks = server.load(*range(10))
    assert 0.5 < time.monotonic() - began < 1.9
    assert result.success
    assert blocks == [block_of(number) for number in range(10)]
    began = time.monotonic()
    server.tier.submit_load(server.job(range(10), is_promotion=True))
    server.tier.drain_jobs()
    assert time.monotonic() - began < 0.5


def test_shutdown_makes_all_durable_and_can_be_repeated(serve: Callable[..., DurableServer]) -> None:
    server = serve()
    for number in range(10):
        server.tier.submit_store(server.job([number], is_promotion=False))
    server.tier.shutdown()
    server.tier.shutdown()
    assert serve().lookup(*range(10)) == [True] * 10


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"pth": "/x"}, "did you mean 'path'"),
        ({"path": "relative"}, "absolute"),
        ({"bytes": "much"}, "100GiB"),
        ({"bytes": 1000}, "give the tier at least"),
        ({"threads": 0}, "from 1 to 64"),
        ({"encrypt": True}, "secret_file"),
        ({"encrypt": "yes"}, "true or false"),
        ({"locality": "MOON"}, "LOCAL"),
        ({"sync_seconds": 0}, "from 0.1 to 60"),
        ({"sync_seconds": "1s"}, "from 0.1 to 60"),
        ({"path": "/proc/nowhere"}, "cannot be used"),
    ],
)
def test_wrong_options_are_refused_with_the_way_out(wrong: dict[str, Any], match: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=match):
        DurableServer({**options, **wrong})


def test_what_is_needed_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match='needs path, as in {"type": "durable"'):
        DurableTierManager(
            CPUOffloadingSpec(offloading_config(block_bytes=BLOCK)),
            memoryview(np.zeros((2, BLOCK), np.uint8)),
            "durable",
            bytes=BYTES,
        )
