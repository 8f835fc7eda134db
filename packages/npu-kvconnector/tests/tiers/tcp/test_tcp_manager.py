"""The p2p tier over TCP between servers: the very blocks, or a miss, whatever a peer does."""

from __future__ import annotations

import dataclasses
import logging
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, ReqContext, make_offload_key

from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.tcp.client import Peer
from npu_kvconnector.tiers.tcp.messages import MOST_ASKED
from npu_kvconnector.tiers.tcp.server import _MOST_ANSWERS
from tests.support.remote_tier import BLOCK, CHUNKS, block_of, key_of
from tests.support.server import until
from tests.support.signals import stop
from tests.support.stores import free_port
from tests.support.tcp_tier import TcpServer, secret_in, stranger

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_kvconnector.tiers.tcp.server import Kind

    Serve = Callable[..., TcpServer]

NUMBERS = range(20)


def held(server: TcpServer) -> float:
    return server.counts().get("held_bytes", 0.0)


def records_of(server: TcpServer) -> list[bytearray]:
    """Return the records that a server holds, which a test may damage."""
    return [record for entry in server.tier._exchange.outbox._transfers.values() for record in entry.records.values()]


def kind_with(server: TcpServer, **changes: Any) -> Kind:
    return dataclasses.replace(server.tier._exchange._kind, **changes)


def test_blocks_go_from_the_server_that_computed_them_to_the_one_that_asks(serve: Serve) -> None:
    prefill, decode = serve(), serve()
    params = prefill.compute(*NUMBERS)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": params["remote_request_id"] if params else None,
        "remote_host": "127.0.0.1",
        "remote_port": prefill.port,
    }
    found, blocks = decode.fetch(params, *NUMBERS, 20)
    assert found == [True] * 20 + [False]
    assert blocks == [block_of(number) for number in NUMBERS]
    assert prefill.counts()["sent_blocks"] == 20
    assert until(lambda: held(prefill) == 0)  # who has them says so


def test_a_router_may_name_the_transfer(serve: Serve) -> None:
    prefill, decode = serve(), serve()
    assert prefill.compute(*NUMBERS, params={"remote_decoder": {"kv_request_id": "t"}}) is None
    place = {"kv_request_id": "t", "remote_host": "127.0.0.1", "remote_port": prefill.port}
    assert decode.fetch({"remote_prefiller": place}, *NUMBERS)[1] == [block_of(number) for number in NUMBERS]


def test_many_parts_at_once_are_put_together_right(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_kvconnector.tiers.tcp.exchange._PART_BYTES", 3 * BLOCK)
    prefill, decode = serve(), serve({"pending_bytes": 6 * BLOCK})
    numbers = range(64)
    assert decode.fetch(prefill.compute(*numbers), *numbers) == ([True] * 64, [block_of(n) for n in numbers])


def test_no_more_is_asked_for_at_once_than_the_peer_has_room_to_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, most = 0, 0

    async def get(self: Peer, transfer: str, names: list[bytes]) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await real(self, transfer, names)
        finally:
            under_way -= 1

    real = Peer.get
    monkeypatch.setattr(Peer, "get", get)
    monkeypatch.setattr("npu_kvconnector.tiers.tcp.exchange._PART_BYTES", BLOCK)
    prefill, decode = serve(), serve({"pending_bytes": 1000 * BLOCK})
    numbers = range(CHUNKS)
    assert decode.fetch(prefill.compute(*numbers), *numbers)[1] == [block_of(n) for n in numbers]
    assert CHUNKS > most == MOST_ASKED < _MOST_ANSWERS / 2


def test_other_requests_have_nothing_to_do_with_it(serve: Serve) -> None:
    server = serve()
    request = server.begin(None)
    assert server.store(request, *NUMBERS).success
    assert server.tier.transfer_params(request) is None
    assert server.lookup(request, 1) == [False]
    assert not server.load(request, 1)[0].success
    assert held(server) == 0


def test_all_blocks_of_a_prompt_are_asked_for(serve: Serve) -> None:
    tier = serve().tier
    context = ReqContext(req_id="r", kv_transfer_params={"do_remote_decode": True})
    assert tier.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    assert tier.on_new_request(ReqContext(req_id="s")).policy is OffloadPolicy.CHUNK_LEVEL


def test_who_asks_early_waits_for_blocks_that_are_being_computed(serve: Serve) -> None:
    prefill, decode = serve(), serve({"deadline": 20.0})
    computing = prefill.begin({"do_remote_decode": True})
    asking = decode.begin(prefill.tier.transfer_params(computing))
    assert decode.tier.lookup(key_of(1), asking) is LookupResult.RETRY
    decode.step()
    time.sleep(0.2)
    assert decode.tier.lookup(key_of(1), asking) is LookupResult.RETRY
    prefill.store(computing, 1)
    assert decode.lookup(asking, 1) == [True]
    prefill.tier.on_request_finished(computing)
    assert decode.lookup(asking, 1, 2) == [True, False]
    assert decode.load(asking, 1)[1] == [block_of(1)]


@pytest.mark.parametrize("change", ["transfer", "tokens", "namespace", "model", "secret", "seed", "peer"])
def test_nobody_gets_what_is_not_his(
    serve: Serve, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="vllm.npu_kvconnector")
    logging.getLogger("vllm").propagate = True
    options: dict[str, Any] = {
        "namespace": {"namespace": "b"},
        "model": {"revision": "another"},
        "secret": {"secret_file": secret_in(tmp_path, "another secret of sixteen")},
        "peer": {"peers": ["127.0.0.2", "localhost", "127.0.0.1:1"]},
    }.get(change, {})
    prefill = serve({"namespace": "a"})
    params = prefill.compute(*NUMBERS)
    assert params is not None
    if change == "transfer":
        params["remote_request_id"] = "another"
    if change == "seed":
        monkeypatch.setattr("npu_kvconnector.tiers.tcp.manager.get_none_hash_seed", lambda: "another")
    numbers = range(20, 40) if change == "tokens" else NUMBERS
    decode = serve({"namespace": "a"} | options)
    assert decode.fetch(params, *numbers) == ([False] * 20, [])
    request = decode.begin(params)
    assert not decode.load(request, *numbers)[0].successful_keys
    says = {
        "namespace": "another namespace",
        "model": "weights is r there and another here",
        "secret": "secret_file",
        "seed": "PYTHONHASHSEED",
        "peer": "not among the peers",
    }
    assert says.get(change, "") in caplog.text
    honest = serve({"namespace": "a"}) if change != "seed" else None
    if honest is not None and change != "tokens":
        fresh = prefill.compute(*NUMBERS)
        assert honest.fetch(fresh, *NUMBERS)[0] == [True] * 20


def test_who_would_be_refused_gets_nothing_unasked_either(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = serve(), serve()
    params = prefill.compute(*NUMBERS)
    with monkeypatch.context() as another:
        another.setattr(decode.tier._exchange, "_kind", kind_with(decode, seed=lambda: "another"))
        assert not decode.load(decode.begin(params), *NUMBERS)[0].successful_keys
    assert decode.counts()["failures"] == 1
    assert prefill.counts().get("sent_blocks", 0) == 0
    assert held(prefill) > 0
    assert serve().fetch(params, *NUMBERS)[0] == [True] * 20


def test_a_short_hash_is_not_relied_on(serve: Serve) -> None:
    server = serve()
    request = server.begin(
        {"do_remote_prefill": True, "remote_request_id": "t", "remote_host": "127.0.0.1", "remote_port": 1}
    )
    assert server.tier.lookup(make_offload_key(b"short", 0), request) is LookupResult.MISS


def test_every_flipped_byte_is_noticed(serve: Serve) -> None:
    """Each byte of the header, and some of the block, with another bit: never loaded, and the others are."""
    prefill, decode = serve(), serve({"deadline": 5.0})
    places = [*range(128), *range(128, 128 + BLOCK, 251)]
    for place in places:
        params = prefill.compute(1)
        (record,) = records_of(prefill)
        record[place] ^= 1 << place % 8
        request = decode.begin(params)
        assert decode.lookup(request, 1) == [True]
        result, blocks = decode.load(request, 1)
        assert not result.success
        assert not result.successful_keys
        assert blocks == [b"\xee" * BLOCK]
        decode.tier.on_request_finished(request)
        prefill.tier._exchange.outbox.drop(list(prefill.tier._exchange.outbox._transfers))
        _forgive(decode)
    assert decode.counts()["rejected_blocks"] == len(places)
    assert decode.fetch(prefill.compute(1), 1)[1] == [block_of(1)]


def _forgive(server: TcpServer) -> None:
    """Let a peer be asked again that has failed."""
    for peer in server.tier._exchange.peers.values():
        peer._breaker._open_until = 0.0
        peer._breaker.allows()


@pytest.mark.parametrize("kind", ["cut", "longer", "empty", "swapped", "another's codec"])
def test_records_that_are_not_what_they_should_be_are_left_out(serve: Serve, kind: str) -> None:
    prefill, decode = serve(), serve()
    params = prefill.compute(1, 2)
    (entry,) = prefill.tier._exchange.outbox._transfers.values()
    first, second = entry.records
    if kind == "swapped":
        entry.records[first], entry.records[second] = entry.records[second], entry.records[first]
    elif kind == "another's codec":
        body = entry.records[first][128:]
        header = prefill.tier._exchange._realm.header(key_of(1), body, plain_bytes=len(body), codec=1)
        entry.records[first] = bytearray(header + body)
    else:
        entry.records[first] = {"cut": entry.records[first][:-1], "longer": entry.records[first] + b"x", "empty": b""}[
            kind
        ]
    request = decode.begin(params)
    assert decode.lookup(request, 1, 2) == [True, True]
    result, blocks = decode.load(request, 1, 2)
    assert not result.success
    assert blocks[0] == b"\xee" * BLOCK
    assert set(result.successful_keys or ()) == (set() if kind == "swapped" else {key_of(2)})


def test_memory_for_peers_is_bounded_and_what_has_no_room_is_a_miss(serve: Serve) -> None:
    prefill, decode = serve({"bytes": 10 * (BLOCK + 128)}), serve()
    params = prefill.compute(*NUMBERS)
    counts = prefill.counts()
    assert counts["dropped_blocks"] == 10
    assert counts["held_bytes"] == 10 * (BLOCK + 128)
    found, blocks = decode.fetch(params, *NUMBERS)
    assert found == [True] * 10 + [False] * 10
    assert blocks == [block_of(number) for number in range(10)]


def test_what_nobody_fetches_is_given_up(serve: Serve) -> None:
    prefill = serve({"unbound_store_timeout_s": 0.2})
    params = prefill.compute(*NUMBERS)
    assert until(lambda: prefill.tier._exchange.outbox.used_bytes == 0)
    assert prefill.counts()["expired_blocks"] == 20
    assert serve().fetch(params, *NUMBERS)[0] == [False] * 20


def test_a_request_that_waits_for_its_turn_keeps_its_blocks(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_kvconnector.tiers.tcp.exchange._KEEP_SECONDS", 0.1)
    prefill, decode = serve({"unbound_store_timeout_s": 1.0}), serve()
    decode.fetch(prefill.compute(1), 1)  # it has a connection
    params = prefill.compute(*NUMBERS)
    request = decode.begin(params)
    time.sleep(3)
    assert decode.lookup(request, *NUMBERS) == [True] * 20
    decode.tier.on_request_finished(request)
    assert until(lambda: prefill.tier._exchange.outbox.used_bytes == 0)


def test_one_bad_block_among_many_parts_is_one_failure(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_kvconnector.tiers.tcp.exchange._PART_BYTES", BLOCK)
    prefill, decode = serve(), serve({"num_threads": 3})
    params = prefill.compute(*NUMBERS)
    records_of(prefill)[0][500] ^= 1
    request = decode.begin(params)
    assert decode.lookup(request, *NUMBERS) == [True] * 20
    assert not decode.load(request, *NUMBERS)[0].success
    assert decode.counts()["failures"] == 1
    assert decode.fetch(prefill.compute(*NUMBERS), *NUMBERS)[0] == [True] * 20


@pytest.mark.parametrize("when", ["asked", "loading"])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_stalls_or_dies_is_a_miss_in_time(
    serve: Serve, tmp_path: Path, how: signal.Signals, when: str
) -> None:
    decode = serve({"deadline": 1.0})
    with stranger(tmp_path, 40) as (process, params):
        assert decode.fetch(params | {"remote_request_id": "none"}, 1)[0] == [False]
        request = decode.begin(params)
        if when == "loading":
            assert decode.lookup(request, *NUMBERS) == [True] * 20
        if how == signal.SIGKILL:
            process.kill()
            process.wait()
        else:
            stop(process.pid)
        began = time.monotonic()
        if when == "asked":
            assert decode.lookup(request, *NUMBERS) == [False] * 20
        result, blocks = decode.load(request, *NUMBERS)
        assert not result.success
        assert not result.successful_keys
        assert set(blocks) == {b"\xee" * BLOCK}
        assert time.monotonic() - began < 20
        if how == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)  # a late answer must not be written
            assert {decode.memory[number].tobytes() for number in NUMBERS} == {b"\xee" * BLOCK}
            _forgive(decode)
            assert decode.load(request, *NUMBERS)[1] == [block_of(number) for number in NUMBERS]
    assert decode.counts()["failures"] >= 1


def test_a_peer_that_cannot_be_reached_is_left_alone_after_some_tries(serve: Serve) -> None:
    decode = serve({"deadline": 10.0})
    place = {"kv_request_id": "t", "remote_host": "127.0.0.1", "remote_port": free_port()}
    began = time.monotonic()
    for _ in range(3):
        assert decode.fetch({"remote_prefiller": place}, 1) == ([False], [])
    assert time.monotonic() - began < 10
    failures = decode.counts()["failures"]
    assert failures >= 3
    assert decode.fetch({"remote_prefiller": place}, 1) == ([False], [])
    assert decode.counts().get("failures", 0) == 0


def test_a_port_that_is_taken_stops_the_start(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"127.0.0.1:{port}"):
            serve({"port": port})


def test_a_host_without_an_address_stops_the_start(serve: Serve) -> None:
    with pytest.raises(OptionError, match="no.such.host.invalid"):
        serve({"host": "no.such.host.invalid"})


def test_the_secret_is_told_nobody(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    prefill, decode = serve(), serve()
    decode.fetch(prefill.compute(1), 1)
    assert "0123456789abcdef" not in "".join(capfd.readouterr())
    assert "0123456789abcdef" not in repr(prefill.tier._config)
