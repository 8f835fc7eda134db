"""The host tier's memory: within what is there, taken when it is made, by one process after another, without a name."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import uuid
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the region is vLLM's; install npu-kvconnector[vllm]")

from npu_kvconnector.errors import CapacityError, UnsupportedError
from npu_kvconnector.tiers import host
from npu_kvconnector.tiers.host import LOCK, HostRegion
from tests.support.vllm_process import run_program

ROW = 8192

TAKE = """
import sys
from pathlib import Path
from npu_kvconnector.tiers.host import HostRegion
def shared():
    return int(Path("/proc/self/statm").read_text().split()[2]) * 4096
before = shared()
region = HostRegion(sys.argv[1], num_chunks=60 << 7, rank=0, kv_bytes_per_chunk=8192, cpu_page_size=4096)
print(shared() - before)
region.cleanup()
"""


@pytest.fixture
def engine() -> str:
    return f"test-{uuid.uuid4()}"


def region_of(engine: str, rank: int | None, chunks: int = 4, row: int = ROW) -> HostRegion:
    return HostRegion(engine, num_chunks=chunks, rank=rank, kv_bytes_per_chunk=row, cpu_page_size=row // 2)


def test_workers_have_their_places_in_the_rows_that_the_scheduler_sees(engine: str) -> None:
    workers = [region_of(engine, rank) for rank in (0, 1)]
    scheduler = region_of(engine, None)
    assert [region.is_creator for region in (*workers, scheduler)] == [True, False, False]
    for number, worker in enumerate(workers):
        worker.create_next_worker_view(ROW // 2).fill_(number + 1)
    rows = scheduler.base_tensor.view(4, 2, ROW // 2)
    assert (rows[:, 0] == 1).all()
    assert (rows[:, 1] == 2).all()
    for region in (*workers, scheduler):
        region.cleanup()
    assert not Path(scheduler.mmap_path).exists()


def test_the_name_can_go_while_the_region_is_in_use(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    worker, scheduler = region_of(engine, 0), region_of(engine, None)
    scheduler.forget_name()
    assert not Path(worker.mmap_path).exists()
    worker.base_tensor.fill_(3)
    assert (scheduler.base_tensor == 3).all()
    worker.cleanup()
    worker.cleanup()
    scheduler.cleanup()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_it_is_bounded_by_what_the_host_has(engine: str) -> None:
    with pytest.raises(CapacityError, match="lower cpu_bytes_to_use"):
        region_of(engine, 0, chunks=2**32)
    assert not Path(f"/dev/shm/vllm_offload_{engine}.mmap").exists()


def test_it_is_bounded_by_what_is_left_of_a_larger_host(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 4 * ROW - 1)  # as in a control group
    with pytest.raises(CapacityError, match="32767 bytes are available on this host and in its control groups"):
        region_of(engine, 0)
    assert not Path(f"/dev/shm/vllm_offload_{engine}.mmap").exists()


def test_ranks_with_caches_of_different_sizes_are_refused(engine: str) -> None:
    region = region_of(engine, 0)
    with pytest.raises(UnsupportedError, match="equal stages"):
        region_of(engine, 1, row=ROW // 2)
    region.cleanup()


def test_its_memory_is_there_before_anything_is_stored(engine: str) -> None:
    done = run_program(TAKE, engine)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) >= 60 << 20


def test_a_process_waits_for_the_one_that_takes_memory(engine: str) -> None:
    region_of(engine, 0).cleanup()
    other = threading.Thread(target=lambda: region_of(engine, 0).cleanup())
    descriptor = os.open(LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    other.start()
    other.join(0.2)
    assert other.is_alive()
    os.close(descriptor)
    other.join(60)
    assert not other.is_alive()


def test_a_process_that_waits_for_long_says_for_what(
    engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "_PATIENCE", 0.1)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with host._turn():
        other = threading.Thread(target=lambda: region_of(engine, 0).cleanup())
        other.start()
        other.join(1)
        assert other.is_alive()
    other.join(60)
    assert not other.is_alive()
    assert f"fuser {LOCK}" in caplog.text


def test_a_folder_of_another_user_s_is_refused_with_the_way_out(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LOCK", tmp_path / "file" / "lock")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CapacityError, match="set TMPDIR"):
        region_of(engine, 0)
    (tmp_path / "file").unlink()
    (tmp_path / "file").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(CapacityError, match="another user's"):
        region_of(engine, 0)
