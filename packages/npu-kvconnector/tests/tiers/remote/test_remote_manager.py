"""The remote tier over real stores: exact blocks or misses, between servers, tenants and tiers that fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.remote import valkey_store
from npu_kvconnector.tiers.remote.background import BackgroundLoop, loop_for_bulk
from npu_kvconnector.tiers.remote.config import RemoteConfig
from npu_kvconnector.tiers.remote.store import Record
from tests.support.remote_tier import BLOCK, Server, block_of, key_of, s3_options
from tests.support.server import until
from tests.support.stores import S3Server, ValkeyServer, tls_relay

if TYPE_CHECKING:
    from collections.abc import Callable

    Serve = Callable[..., Server]


def test_blocks_come_back_to_this_server_and_to_another(serve: Serve, options: dict[str, Any]) -> None:
    numbers = range(20)
    one = serve(options)
    assert one.lookup(*numbers) == [False] * 20
    assert one.store(*numbers).success
    assert one.lookup(*numbers, 20) == [True] * 20 + [False]
    two = serve(options)
    for server in (one, two):
        assert until(lambda server=server: server.lookup(*numbers) == [True] * 20)
        result, blocks = server.load(*numbers)
        assert result.success
        assert blocks == [block_of(number) for number in numbers]


def test_blocks_that_are_gone_are_misses_and_the_others_load(serve: Serve, options: dict[str, Any]) -> None:
    server = serve(options)
    server.store(1, 2)
    result, blocks = server.load(1, 50, 2)
    assert not result.success
    assert set(result.successful_keys or ()) == {key_of(1), key_of(2)}
    assert blocks[::2] == [block_of(1), block_of(2)]
    assert blocks[1] == b"\xee" * len(blocks[1])


@pytest.mark.parametrize("change", ["namespace", "secret", "model", "tokens"])
def test_tenants_do_not_see_each_other(serve: Serve, options: dict[str, Any], tmp_path: Path, change: str) -> None:
    secrets = {name: tmp_path / name for name in ("ours", "theirs")}
    for name, path in secrets.items():
        path.write_text(name * 8)
        path.chmod(0o600)
    ours = {**options, "secret_file": str(secrets["ours"]), "namespace": "a"}
    theirs = {
        "namespace": {**ours, "namespace": "b"},
        "secret": {**ours, "secret_file": str(secrets["theirs"])},
        "model": {**ours, "revision": "another"},
        "tokens": ours,
    }[change]
    assert serve(ours).store(*range(5)).success
    other = serve(theirs)
    numbers = range(5) if change != "tokens" else range(5, 10)
    time.sleep(0.3)  # for a listing, which must not find them
    assert other.lookup(*numbers) == [False] * 5
    result, _ = other.load(*numbers)
    assert not result.success
    assert not result.successful_keys
    assert serve(ours).tier is not None


def test_damaged_blocks_are_misses_and_are_stored_anew(serve: Serve, tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = {"url": f"file://{store}", "refresh": 0.1}
    server = serve(options)
    server.store(*range(8))
    (pack,) = store.rglob("*.pack")
    content = bytearray(pack.read_bytes())
    content[-100] ^= 1  # in the last block
    pack.write_bytes(content)
    result, blocks = server.load(*range(8))
    assert not result.success
    assert set(result.successful_keys or ()) == {key_of(number) for number in range(7)}
    assert blocks[:7] == [block_of(number) for number in range(7)]
    assert server.counts()["rejected_blocks"] == 1
    assert server.lookup(*range(8)) == [True] * 7 + [False]
    assert server.store(*range(8)).success
    assert server.load(*range(8))[1] == [block_of(number) for number in range(8)]


@pytest.mark.parametrize("content", [b"", b"NPUKVPAK", b"x" * 100_000, os.urandom(5000)], ids=len)
def test_foreign_objects_in_the_folder_are_left_alone(serve: Serve, tmp_path: Path, content: bytes) -> None:
    store = tmp_path / "store"
    options = {"url": f"file://{store}", "refresh": 0.1}
    one = serve(options)
    one.store(1)
    (pack,) = store.rglob("*.pack")
    (pack.parent / f"{'f' * 12}-0123456789abcdef.pack").write_bytes(content)
    (pack.parent / "README").write_bytes(content)
    two = serve(options)
    assert until(lambda: two.lookup(1) == [True])
    assert two.load(1)[1] == [block_of(1)]


def test_damaged_values_in_valkey_are_deleted(serve: Serve, valkey: ValkeyServer) -> None:
    import valkey as client

    server = serve({"url": valkey.url})
    server.store(1, 2)
    beside = client.Valkey.from_url(valkey.url)
    one, two = beside.keys("npukv:*")
    values = [beside.get(one), beside.get(two)]
    beside.set(one, values[1])  # each other's
    beside.set(two, values[0])
    result, _ = server.load(1, 2)
    assert not result.success
    assert not result.successful_keys
    assert beside.keys("npukv:*") == []
    assert server.store(1, 2).success
    assert server.load(1, 2)[1] == [block_of(1), block_of(2)]


def test_blocks_expire_where_asked(serve: Serve, valkey: ValkeyServer) -> None:
    server = serve({"url": valkey.url, "ttl": 0.2})
    server.store(1)
    assert until(lambda: server.lookup(1) == [False], 5)


def test_a_pack_that_a_rule_has_deleted_is_a_miss(serve: Serve, tmp_path: Path) -> None:
    server = serve({"url": f"file://{tmp_path / 'store'}"})
    server.store(1, 2)
    for pack in (tmp_path / "store").rglob("*.pack"):
        pack.unlink()
    assert not server.load(1, 2)[0].success
    assert server.lookup(1, 2) == [False, False]


def test_small_packs_hold_all_blocks(serve: Serve, tmp_path: Path) -> None:
    server = serve({"url": f"file://{tmp_path / 'store'}", "pack_bytes": 10_000})
    assert server.store(*range(30)).success
    assert len(list((tmp_path / "store").rglob("*.pack"))) >= 10
    assert server.load(*range(30))[1] == [block_of(number) for number in range(30)]


def test_a_block_is_not_written_twice(serve: Serve, tmp_path: Path) -> None:
    server = serve({"url": f"file://{tmp_path / 'store'}"})
    server.store(1, 2)
    server.store(1, 2)
    assert len(list((tmp_path / "store").rglob("*.pack"))) == 1


def test_what_does_not_fit_the_queue_is_dropped_and_counted(serve: Serve, valkey: ValkeyServer) -> None:
    server = serve({"url": valkey.url, "pending_bytes": 3 * 4096})
    assert not server.store(*range(4)).success
    assert server.counts()["dropped_blocks"] == 4
    assert server.store(*range(3)).success
    assert not server.load(*range(4))[0].success


def test_a_stalled_store_costs_a_deadline_and_then_nothing(serve: Serve, valkey: ValkeyServer) -> None:
    server = serve({"url": valkey.url, "deadline": 0.3, "lookup_deadline": 0.1})
    server.store(1)
    valkey.stall()
    results = [server.load(1)[0] for _ in range(3)]
    assert not any(result.success for result in results)
    assert all(result.transfer_time is not None and result.transfer_time < 3 for result in results)
    assert server.counts()["left_alone"] == 1
    # Left alone: not even a question is sent.
    assert server.lookup(1) == [False]
    assert not server.store(2).success
    valkey.resume()
    assert until(lambda: server.lookup(1) == [True])
    assert server.load(1)[1] == [block_of(1)]
    assert server.counts()["left_alone"] == 0


def test_questions_of_one_step_wait_together_for_a_store_that_is_silent(serve: Serve, valkey: ValkeyServer) -> None:
    server = serve({"url": valkey.url, "lookup_deadline": 0.5})
    server.store(1)
    requests = [ReqContext(req_id=f"together-{number}") for number in range(8)]
    valkey.stall()
    began = time.monotonic()
    waiting = dict(enumerate(requests, 2))
    while waiting:
        answers = {number: server.tier.lookup(key_of(number), request) for number, request in waiting.items()}
        waiting = {number: waiting[number] for number, answer in answers.items() if answer is LookupResult.RETRY}
        assert LookupResult.HIT not in answers.values()
        server.step()
    assert 0.4 < time.monotonic() - began < 0.95
    assert server.counts()["left_alone"] == 1
    valkey.resume()
    assert until(lambda: server.lookup(1) == [True])


def test_a_store_that_refuses_blocks_is_asked_again(serve: Serve, valkey: ValkeyServer) -> None:
    import valkey as client

    beside = client.Valkey.from_url(valkey.url)
    server = serve({"url": valkey.url, "pack_bytes": 4 * BLOCK, "ttl": 60.0})
    beside.config_set("maxmemory", 1)
    beside.config_set("maxmemory-policy", "noeviction")
    assert not server.store(*range(8)).success
    assert server.counts()["failures"] == 1
    beside.config_set("maxmemory", 0)
    assert server.store(*range(8)).success
    assert server.load(*range(8))[1] == [block_of(number) for number in range(8)]
    assert all(50_000 < beside.pttl(key) <= 60_000 for key in beside.keys("npukv:*"))


@pytest.mark.parametrize("loop", [loop_for_bulk, asyncio.new_event_loop])
def test_a_block_that_was_given_up_is_not_read_any_more(valkey: ValkeyServer, loop: Any) -> None:
    """Longer than what the sockets' buffers take, so that its sending has begun and cannot end."""
    background = BackgroundLoop("test", loop)
    store = valkey_store.ValkeyStore(RemoteConfig(url=valkey.url), b"r" * 16, 2**26)
    block = bytearray(2**26)

    async def save(name: bytes) -> None:
        async with asyncio.timeout(0.3):
            await store.save([Record(name, b"header", memoryview(block))])

    background.submit(store.find([b"n" * 32])).result()
    valkey.stall()
    with pytest.raises(TimeoutError):
        background.submit(save(b"n" * 32)).result()
    valkey.resume()

    def is_let_go() -> bool:
        gc.collect()  # what was given up ends when its loop next runs, in a ring of errors and their frames
        with contextlib.suppress(BufferError):
            block.append(0)
            return True
        return False

    assert until(is_let_go)
    assert background.submit(store.find([b"n" * 32])).result() == [False]
    background.submit(store.save([Record(b"m" * 32, b"header", b"whole")])).result()
    assert background.submit(store.find([b"n" * 32, b"m" * 32])).result() == [False, True]
    background.stop(store.close())


def test_the_work_of_a_server_on_this_host_counts(serve: Serve, valkey: ValkeyServer, tmp_path: Path) -> None:
    shares = [
        serve(options | {"busy_share": 0.3}).tier._restraint._share
        for options in ({"url": valkey.url}, {"url": f"file://{tmp_path}"}, {"url": "valkeys://elsewhere:6379/0"})
    ]
    assert shares == pytest.approx([0.1, 0.3, 0.3])


def test_blocks_go_over_a_unix_socket(serve: Serve, tmp_path: Path) -> None:
    place = tempfile.TemporaryDirectory()  # a short one: names of sockets have 107 bytes at most
    valkey = ValkeyServer(tmp_path, unix_socket=f"{place.name}/socket")
    valkey.start()
    server = serve({"url": f"unix://{place.name}/socket"})
    assert server.store(*range(8)).success
    assert server.load(*range(8))[1] == [block_of(number) for number in range(8)]
    connections = server.tier._store._client.connection_pool._available_connections
    sockets = [connection._writer.transport.get_extra_info("socket") for connection in connections]
    default = int(Path("/proc/sys/net/core/wmem_default").read_text())
    assert any(each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > default for each in sockets)
    valkey.kill()
    place.cleanup()


def test_a_store_may_take_as_long_as_the_deadline_says(serve: Serve, valkey: ValkeyServer) -> None:
    """Valkey's client would give up by itself after five seconds."""
    server = serve({"url": valkey.url, "deadline": 60.0, "hedge": False})
    assert server.store(1).success
    valkey.stall()
    resuming = threading.Timer(6.0, valkey.resume)
    resuming.start()
    result, blocks = server.load(1)
    resuming.join()
    assert result.success
    assert blocks == [block_of(1)]
    assert server.counts() == {"left_alone": 0}


def test_a_load_in_no_hurry_ends_in_half_its_time_and_questions_do_not_wait_for_it(
    serve: Serve, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where cores are short all the time."""
    server = serve(options | {"deadline": 3.0})
    server.store(*range(8))
    assert until(lambda: server.lookup(*range(8)) == [True] * 8)
    monkeypatch.setattr(server.tier._courtesy, "rest", lambda ahead: max(0.0, ahead))
    began = time.monotonic()
    server.tier.submit_load(server.job(range(8), is_promotion=True))
    assert server.lookup(*range(8)) == [True] * 8
    assert time.monotonic() - began < 0.5
    server.memory[:] = 0xEE
    assert server.finish().success
    assert 1.2 < time.monotonic() - began < 3.0
    assert server.memory[7].tobytes() == block_of(7)


def test_a_store_beside_busy_cores_rests_between_packs_and_ends_in_half_its_time(
    serve: Serve, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where cores are short all the time; the deadline is of a request, not of the job."""
    guarded = [{"type": "remote", "guard": {"store_seconds": 2.0}}]
    server = serve(options | {"deadline": 0.6, "pack_bytes": 2 * BLOCK}, secondary_tiers=guarded)
    rests: list[float] = []

    def rest(ahead: float) -> float:
        rests.append(ahead)
        return max(0.0, ahead)

    monkeypatch.setattr(server.tier._restraint, "rest", rest)
    monkeypatch.setattr(server.tier._restraint, "still_rests", lambda: True)
    began = time.monotonic()
    assert server.store(*range(8)).success
    assert 0.9 < time.monotonic() - began < 1.9
    assert len(rests) == 4
    assert until(lambda: server.lookup(*range(8)) == [True] * 8)
    assert server.load(*range(8))[1] == [block_of(number) for number in range(8)]


@pytest.mark.parametrize("why", ["idle cores", "hurry"])
def test_a_store_that_rests_goes_on_as_soon_as_there_is_no_reason_to(
    why: str, serve: Serve, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(options | {"pack_bytes": 2 * BLOCK})
    monkeypatch.setattr(server.tier._restraint, "rest", lambda ahead: 30.0)
    monkeypatch.setattr(server.tier._restraint, "still_rests", lambda: why == "hurry")
    server.tier.submit_store(server.job(range(8), is_promotion=False))
    began = time.monotonic()
    if why == "hurry":
        server.tier.drain_jobs()
    assert server.finish().success
    assert time.monotonic() - began < 10


def test_blocks_of_a_store_that_ends_early_are_counted_once(
    serve: Serve, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve({"url": valkey.url, "deadline": 0.5, "pack_bytes": 2 * BLOCK})
    asked = server.tier._store.save
    calls = 0

    async def save(records: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            valkey.stall()
        await asked(records)

    monkeypatch.setattr(server.tier._store, "save", save)
    assert not server.store(*range(8)).success
    valkey.resume()
    assert server.counts()["dropped_blocks"] == 4
    assert until(lambda: server.lookup(*range(4)) == [True] * 4)


def test_many_blocks_are_saved_some_at_a_time(
    serve: Serve, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_store, "_REPLY_BYTES", 3 * 4300)
    server = serve({"url": valkey.url})
    sizes = []
    save = valkey_store.ValkeyStore._save

    async def note(store: Any, records: Any) -> None:
        sizes.append(len(records))
        await save(store, records)

    monkeypatch.setattr(valkey_store.ValkeyStore, "_save", note)
    assert server.store(*range(10)).success
    assert sizes == [3, 3, 3, 1]
    assert server.load(*range(10))[1] == [block_of(number) for number in range(10)]


def test_nothing_is_written_after_a_job_was_reported(serve: Serve, valkey: ValkeyServer) -> None:
    server = serve({"url": valkey.url, "deadline": 0.2})
    server.store(1, 2)
    valkey.stall()
    server.load(1, 2)
    server.memory[:] = 0xAA  # the chunks hold other blocks by now
    valkey.resume()
    time.sleep(0.5)
    assert (server.memory == 0xAA).all()


def test_a_killed_store_is_a_miss_and_serves_again_after_its_start(serve: Serve, valkey: ValkeyServer) -> None:
    server = serve({"url": valkey.url, "deadline": 0.5})
    server.store(1)
    valkey.kill()
    assert not server.load(1)[0].success
    assert server.lookup(1) == [False]
    assert not server.store(2).success
    valkey.start()
    assert until(lambda: server.store(1).success)
    assert server.load(1)[1] == [block_of(1)]


@pytest.mark.parametrize("options", ["s3", "valkey"], indirect=True)
def test_a_server_starts_while_its_store_is_down(serve: Serve, options: dict[str, Any]) -> None:
    down = {**options, "deadline": 0.5}
    if "valkey" in down["url"]:
        down["url"] = "valkey://127.0.0.1:1/0"
    else:
        down["store_options"] = {"endpoint": "http://127.0.0.1:1", "region": "us-east-1"}
    server = serve(down)
    assert server.lookup(1) == [False]
    assert not server.store(1).success


def test_an_s3_server_that_dies_and_stalls(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3 = S3Server(tmp_path)
    s3.start()
    s3.make_bucket("blocks")
    server = serve({**s3_options(s3, "p", monkeypatch), "deadline": 0.6})
    assert server.store(1, 2).success
    s3.stall()
    result, _ = server.load(1, 2)
    assert not result.success
    assert result.transfer_time < 5
    s3.resume()
    assert until(lambda: server.load(1, 2)[0].success)
    s3.kill()
    assert not server.load(1, 2)[0].success
    assert not server.store(3).success


def test_credentials_of_s3_are_checked_and_never_logged(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    s3 = S3Server(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="1")
    s3.start()
    s3.make_bucket("blocks")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.DEBUG):
        server = serve({**s3_options(s3, "p", monkeypatch), "deadline": 1.0})
        assert not server.store(1).success
        assert until(lambda: "finds no blocks" in caplog.text)
    s3.kill()
    assert "canary" not in caplog.text
    assert "AKIATEST" not in caplog.text


@pytest.mark.parametrize("variable", ["VALKEYCLI_AUTH", "REDISCLI_AUTH"])
def test_passwords_of_valkey_come_from_the_environment_and_are_never_logged(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    valkey = ValkeyServer(tmp_path, password="canary-right")
    valkey.start()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.DEBUG):
        monkeypatch.setenv(variable, "canary-wrong")
        wrong = serve({"url": valkey.url})
        assert [wrong.store(number).success for number in range(3)] == [False] * 3
        monkeypatch.setenv(variable, "canary-right")
        right = serve({"url": valkey.url})
        assert right.store(1).success
        assert right.load(1)[1] == [block_of(1)]
    valkey.kill()
    assert "leaves its store alone" in caplog.text
    assert "canary" not in caplog.text + repr(right.tier.__dict__)


def test_tls_takes_a_certificate_that_is_trusted_and_no_other(
    serve: Serve, valkey: ValkeyServer, tmp_path: Path
) -> None:
    with tls_relay(valkey.port, tmp_path) as (port, trust):
        options = {"url": f"valkeys://localhost:{port}/0", "deadline": 1.0}
        trusting = serve({**options, "ca_file": str(trust)})
        assert trusting.store(1).success
        assert trusting.load(1)[1] == [block_of(1)]
        stranger = serve(options)
        assert not stranger.store(2).success
        assert stranger.lookup(1) == [False]


def test_tls_of_s3(serve: Serve, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tls_relay(s3.port, tmp_path) as (port, trust):
        options = s3_options(s3, tmp_path.name, monkeypatch)
        options["store_options"]["endpoint"] = f"https://localhost:{port}"
        trusting = serve({**options, "ca_file": str(trust)})
        assert trusting.store(1).success
        assert trusting.load(1)[1] == [block_of(1)]
        assert not serve({**options, "deadline": 1.0}).store(2).success


@pytest.mark.parametrize("codec", ["zstd", "fp8"])
def test_codecs_make_records_smaller(serve: Serve, tmp_path: Path, codec: str) -> None:
    server = serve({"url": f"file://{tmp_path / 'store'}", "codec": codec})
    server.store(*range(8))
    stored = sum(pack.stat().st_size for pack in (tmp_path / "store").rglob("*.pack"))
    assert stored < 0.85 * 8 * 4096
    _, blocks = server.load(*range(8))
    assert all(len(block) == 4096 for block in blocks)
    if codec == "zstd":
        assert blocks == [block_of(number) for number in range(8)]


def test_records_of_a_codec_that_is_not_used_are_misses(serve: Serve, tmp_path: Path) -> None:
    options = {"url": f"file://{tmp_path / 'store'}", "refresh": 0.1}
    serve({**options, "codec": "fp8"}).store(1)
    exact = serve(options)
    assert until(lambda: exact.lookup(1) == [True])
    assert not exact.load(1)[0].success
    assert exact.lookup(1) == [False]


def test_drained_means_that_all_jobs_are_reported(serve: Serve, options: dict[str, Any]) -> None:
    server = serve(options)
    for number in range(6):
        server.tier.submit_store(server.job([number], is_promotion=False))
    server.tier.drain_jobs()
    assert len(list(server.tier.get_finished_jobs())) == 6


def test_shutdown_lets_stores_end(serve: Serve, options: dict[str, Any]) -> None:
    server = serve(options)
    server.memory[7] = 7
    server.tier.submit_store(server.job([7], is_promotion=False))
    server.tier.shutdown()
    other = serve(options)
    assert until(lambda: other.lookup(7) == [True])


def test_hashes_that_can_be_forged_are_not_looked_up_or_stored(serve: Serve, tmp_path: Path) -> None:
    server = serve({"url": f"file://{tmp_path / 'store'}"})
    job = server.job([1], is_promotion=False)
    job.keys = [make_offload_key(b"x" * 16, 0)]  # as of xxhash
    server.tier.submit_store(job)
    assert not server.finish().success
    assert server.tier.lookup(job.keys[0], job.req_context) is LookupResult.MISS
    assert not list((tmp_path / "store").rglob("*.pack"))


def test_options_are_checked_at_the_start(serve: Serve) -> None:
    with pytest.raises(OptionError, match="needs a url"):
        serve({})
