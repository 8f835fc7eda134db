"""A peer asked for whatever it has (`remote_kv_source`), under the managers of tiers: the very blocks, or a miss in time."""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from vllm.v1.engine import core
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import ParentManager, SecondaryTierManager

from npu_kvconnector import compat
from npu_kvconnector.config import OffloadConfig
from npu_kvconnector.spec import NPUTieringSpec
from npu_kvconnector.tiers.tcp import messages, probe
from tests.support.offloading import offloading_config
from tests.support.remote_tier import BLOCK, block_of, key_of
from tests.support.server import until
from tests.support.stores import free_port
from tests.support.tcp_tier import secret_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from npu_kvconnector.frame.manager import TierManager
    from npu_kvconnector.tiers.tcp.manager import TcpTierManager

NUMBERS = range(12)
KEYS = [key_of(number) for number in NUMBERS]
BLOCKS = [block_of(number) for number in NUMBERS]


class Server:
    """The tiers of one server, the last of which is over TCP; `run` takes a step of its scheduler."""

    def __init__(self, folder: Path, *before: dict[str, Any], config: dict[str, Any] | None = None, **options: Any):
        self.port = free_port()
        place = {"host": "127.0.0.1", "port": self.port, "peers": ["127.0.0.1"], "secret_file": secret_in(folder)}
        tier = {"type": "p2p", "transport": "tcp", "revision": "r", "deadline": 2.0} | place | options
        extra = OffloadConfig.parse({"secondary_tiers": [*before, tier]}).for_vllm()
        tiers = extra["secondary_tiers"]
        self.manager: TierManager = NPUTieringSpec(
            offloading_config(block_bytes=BLOCK, secondary_tiers=tiers, **(config or {}))
        ).get_manager()
        self.tier: TcpTierManager = self.manager._tiers[-1].tier  # type: ignore[assignment]

    def run(self, *scheduled: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=scheduled, preempted_req_ids=()))
        time.sleep(0.002)

    def idle(self) -> None:
        """Step as an idle engine does that its tier has woken."""
        if self.manager.has_pending_work():
            self.run()

    def rests(self) -> bool:
        """Return whether there is nothing left to do; else take a step."""
        self.idle()
        return not self.manager.has_pending_work()

    def compute(self, *numbers: int) -> None:
        """Do what a request leads to that nobody asked to hand on."""
        request = ReqContext(req_id=f"own {time.monotonic_ns()}")
        self.manager.on_new_request(request)
        keys = [key_of(number) for number in numbers]
        output = self.manager.prepare_store(keys, request)
        assert output is not None
        memory = self.manager.primary_tier.get_kv_memoryview().cast("B")
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            memory[chunk * BLOCK : (chunk + 1) * BLOCK] = block_of(numbers[keys.index(key)])
        memory.release()
        self.manager.complete_store(output.keys_to_store, request)
        self.manager.on_request_finished(request)
        assert until(self.rests)

    def source(self) -> dict[str, Any]:
        place = {"kv_request_id": "t", "remote_host": "127.0.0.1", "remote_port": self.port}
        return {"remote_kv_source": place}

    def begin(self, source: Server | None) -> ReqContext:
        params = source.source() if source else None
        request = ReqContext(req_id=f"asks {time.monotonic_ns()}", kv_transfer_params=params)
        self.manager.on_new_request(request)
        return request

    def settle(self, request: ReqContext, *others: Server, seconds: float = 20) -> list[bool]:
        """Look up as a scheduler does until all is settled; say what the host tier has then."""
        end = time.monotonic() + seconds
        while True:
            answers = [self.manager.lookup(key, request) for key in KEYS]
            if set(answers) <= {LookupResult.HIT, LookupResult.MISS}:
                return [answer is LookupResult.HIT for answer in answers]
            assert time.monotonic() < end
            self.run()
            for other in others:
                other.idle()

    def ask(self, source: Server, *others: Server) -> list[bytes | None]:
        """Do what a request with `remote_kv_source` leads to; return its blocks, None for what is to be computed."""
        request = self.begin(source)
        found = self.settle(request, source, *others)
        blocks = self.blocks(request, found)
        self.run(request.req_id)
        self.manager.on_request_finished(request)
        return blocks

    def blocks(self, request: ReqContext, found: list[bool]) -> list[bytes | None]:
        keys = [key for key, is_there in zip(KEYS, found, strict=True) if is_there]
        if not keys:
            return [None] * len(found)
        chunks = iter(self.manager.prepare_load(keys, request).chunk_ids)
        rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        blocks = [rows[next(chunks)].tobytes() if is_there else None for is_there in found]
        self.manager.complete_load(keys, request)
        return blocks

    def held(self) -> int:
        return self.tier._exchange.outbox.used_bytes


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as servers:

        def make(*before: dict[str, Any], **options: Any) -> Server:
            server = Server(tmp_path, *before, **options)
            servers.callback(server.manager.shutdown)
            return server

        yield make


def test_a_peer_hands_over_what_it_computed_for_somebody_else(serve: Callable[..., Server]) -> None:
    one, two = serve(), serve()
    one.compute(*NUMBERS)
    assert one.held() == 0
    assert two.ask(one) == BLOCKS
    assert until(lambda: one.held() == 0)  # who has them says so
    stats = two.manager.get_stats()
    assert stats is not None
    hits = stats._values["vllm:kv_offload_tiering_chunk_hits"]
    assert sum(number for label, number in hits.items() if "1:p2p_tcp" in str(label)) == len(KEYS)
    assert until(one.rests)
    assert not one.manager._req_state
    assert not one.tier._exchange.probes._pinned


def test_what_the_peer_lacks_is_computed(serve: Callable[..., Server]) -> None:
    one, two = serve(), serve()
    one.compute(*range(0, 12, 2))
    assert two.ask(one) == [block if number % 2 == 0 else None for number, block in enumerate(BLOCKS)]


def test_two_servers_ask_each_other(serve: Callable[..., Server]) -> None:
    one, two = serve(), serve()
    one.compute(*range(6))
    two.compute(*range(6, 12))
    first, second = one.begin(two), two.begin(one)
    assert one.settle(first, two) == [True] * 12
    assert two.settle(second, one) == [True] * 12
    assert one.blocks(first, [True] * 12) == two.blocks(second, [True] * 12) == BLOCKS


def test_the_peer_looks_into_its_other_tiers_too(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Its host tier has room for eight chunks: looking up the later ones takes the places of the first."""
    one = serve({"type": "fs", "root_dir": str(tmp_path / "fs")}, config={"cpu_bytes_to_use": 8 * BLOCK})
    two = serve()
    one.compute(*range(6))
    one.compute(*range(6, 12))
    blocks = two.ask(one)
    assert all(block in (None, wanted) for block, wanted in zip(blocks, BLOCKS, strict=True))
    assert sum(block is not None for block in blocks) >= 8


def test_few_chunks_are_pinned_at_a_time(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = serve(pending_bytes=3 * BLOCK), serve()
    one.compute(*NUMBERS)
    sizes = []
    make = one.manager.create_store_job

    def create(keys: Any, *more: Any) -> Any:
        sizes.append(len(keys))
        return make(keys, *more)

    monkeypatch.setattr(one.manager, "create_store_job", create)
    assert two.ask(one) == BLOCKS
    assert max(sizes) <= 3
    assert sum(sizes) == 12


def test_what_has_no_room_for_peers_is_computed(serve: Callable[..., Server]) -> None:
    one, two = serve(bytes=5 * (BLOCK + 128)), serve()
    one.compute(*NUMBERS)
    assert two.ask(one) == BLOCKS[:5] + [None] * 7
    assert one.manager._tiers[-1].stores.failures == 0


def test_a_chunk_that_goes_between_look_up_and_pin_is_left_out(serve: Callable[..., Server]) -> None:
    one, two = serve(), serve()
    one.compute(*NUMBERS)
    find, seen = one.manager.lookup, []

    def lookup(key: Any, context: ReqContext, **more: Any) -> LookupResult:
        """As vLLM's, but the third chunk looked up takes the first one's place."""
        seen.append(key)
        if len(seen) == 3:
            one.manager._host.drop([KEYS[0]])
            one.manager._host.drop([key])
        return find(key, context, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.manager, "lookup", lookup)
        assert two.ask(one) == [None, BLOCKS[1], None, *BLOCKS[3:]]


@pytest.mark.parametrize("steps", [False, True], ids=["no-steps", "steps"])
def test_a_peer_that_does_not_answer_costs_its_deadline(serve: Callable[..., Server], steps: bool) -> None:
    """An engine that takes no steps, and one whose tiers never settle."""
    one, two = serve(), serve(deadline=1.0)
    one.compute(*NUMBERS)
    one.manager.is_held = steps
    request = two.begin(one)
    began = time.monotonic()
    assert two.settle(request, *([one] if steps else [])) == [False] * 12
    assert 0.5 < time.monotonic() - began < 5
    assert not two.tier._exchange.peers[f"127.0.0.1:{one.port}"].is_left_alone
    two.manager.on_request_finished(request)
    one.manager.is_held = False
    assert two.ask(one) == BLOCKS
    assert not one.manager._req_state


def test_a_peer_that_dies_is_a_miss(serve: Callable[..., Server], tmp_path: Path) -> None:
    one, two = Server(tmp_path), serve()
    one.compute(*NUMBERS)
    request = two.begin(one)
    assert two.manager.lookup(KEYS[0], request) is LookupResult.RETRY
    two.run()
    one.manager.shutdown()
    assert two.settle(request) == [False] * 12


def test_a_server_that_is_no_peer_is_not_asked(serve: Callable[..., Server]) -> None:
    one, two = serve(), serve(peers=["127.0.0.2"])
    one.compute(*NUMBERS)
    request = two.begin(one)
    assert two.manager.lookup(KEYS[0], request) is LookupResult.MISS
    assert not two.tier._exchange.peers


def test_who_gives_up_leaves_nothing_behind(serve: Callable[..., Server]) -> None:
    one, two = serve(), serve()
    one.compute(*NUMBERS)
    one.manager.is_held = True
    request = two.begin(one)
    two.manager.lookup(KEYS[0], request)
    two.run()
    assert until(lambda: not one.rests() and bool(one.tier._exchange.probes._open))
    two.manager.on_request_finished(request)
    assert until(lambda: not one.tier._exchange.probes._asked)
    one.manager.is_held = False
    one.run()
    assert not one.manager.has_pending_work()
    assert not one.manager._req_state
    assert one.held() == 0


def test_a_reset_in_the_middle_of_a_question_is_an_answer(serve: Callable[..., Server]) -> None:
    """What was sealed before is of the tokens that it says; the rest has gone."""
    one, two = serve(pending_bytes=3 * BLOCK), serve()
    one.compute(*NUMBERS)
    request = two.begin(one)
    assert two.manager.lookup(KEYS[0], request) is LookupResult.RETRY
    assert all(two.manager.lookup(key, request) is LookupResult.RETRY for key in KEYS)
    two.run()
    assert until(lambda: one.tier._exchange.probes.is_waiting)
    one.run()
    one.manager.reset_cache()
    found = two.settle(request, one)
    assert found == [True] * 3 + [False] * 9
    assert two.blocks(request, found)[:3] == BLOCKS[:3]
    assert until(one.rests)
    assert not one.manager._req_state


def test_too_many_questions_find_nothing(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MOST_PROBES", 1)
    one, two = serve(), serve()
    one.compute(*NUMBERS)
    first, second = two.begin(one), two.begin(one)
    for request in (first, second):
        two.manager.lookup(KEYS[0], request)
        two.run()
        time.sleep(0.3)
    assert one.tier._exchange.probes.is_waiting
    assert two.manager.lookup(KEYS[0], second) is LookupResult.MISS
    assert until(lambda: one.rests() and not one.tier._exchange.probes._asked)
    assert two.settle(first, one) == [True] * 12


def test_a_fault_of_ours_in_a_step_is_an_answer(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = serve(), serve()
    one.compute(*NUMBERS)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(one.manager, "create_store_job", fail)
        assert two.ask(one) == [None] * 12
    assert not one.manager._req_state
    assert two.ask(one) == BLOCKS


def test_a_server_whose_own_peers_fail_answers_those_that_ask_it(serve: Callable[..., Server]) -> None:
    """Three chunks are pinned at a time, so that their ends have to be seen as well."""
    one, two = serve(pending_bytes=3 * BLOCK, guard={"open_seconds": 60}), serve()
    one.compute(*NUMBERS)
    guard = one.manager._tiers[-1]
    while guard.loads.allows():
        guard.loads.fail()
    assert two.ask(one) == BLOCKS
    assert not guard.loads.allows()


def test_a_server_that_fails_to_look_up_says_at_once_that_it_has_nothing(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = serve(guard={"failures": 1, "open_seconds": 60}), serve(deadline=10.0)
    one.compute(*NUMBERS)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(one.manager, "create_store_job", fail)
    began = time.monotonic()
    assert [two.ask(one) for _ in range(3)] == [[None] * 12] * 3
    assert time.monotonic() - began < 5
    assert one.manager._tiers[-1].loads.allows()
    assert until(lambda: not one.tier._exchange.probes._asked)
    assert not one.manager.has_pending_work()
    assert not one.manager._req_state


def test_a_question_that_waits_for_a_slow_tier_holds_up_no_other(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_MOST_LOOKUPS", 4)
    silent = {"type": "FlakyTier", "module_path": "tests.support.flaky_tier", "silent_lookup": 1}
    one = serve(silent | {"guard": {"lookup_seconds": 60}})
    patient, other = serve(deadline=30.0), serve()
    one.compute(*NUMBERS)
    first = patient.begin(one)
    for number in range(100, 112):  # which the silent tier may have
        assert patient.manager.lookup(key_of(number), first) is LookupResult.RETRY
    patient.run()
    assert until(lambda: one.tier._exchange.probes.is_waiting)
    one.run()
    assert other.ask(one) == BLOCKS
    assert one.tier._exchange.probes.is_waiting  # the first one still is
    patient.manager.on_request_finished(first)
    assert until(one.rests)


def test_an_older_server_is_named(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The question decodes as one of the first version, whose server refuses it."""
    caplog.set_level(logging.WARNING, logger="vllm.npu_kvconnector")
    logging.getLogger("vllm").propagate = True
    one, two = serve(), serve()
    one.compute(*NUMBERS)
    monkeypatch.setattr("npu_kvconnector.tiers.tcp.server.VERSION", 1)
    assert two.ask(one) == [None] * 12
    assert "speaks version 1 of the protocol, not 3" in caplog.text


def test_the_question_is_one_of_the_first_version_s_and_a_little_more() -> None:
    data = messages.encode(messages.Find(0, messages.VERSION, bytes(16), "0", "t", 1.0, [], [bytes(36)]))
    assert messages.QUESTIONS.decode(data).keys == [bytes(36)]  # type: ignore[union-attr]

    class Find(msgspec.Struct, tag="find", array_like=True, frozen=True):
        seq: int
        version: int
        realm: bytes
        seed: str
        transfer: str
        wait: float
        names: list[bytes]

    assert msgspec.msgpack.decode(data, type=Find).version == messages.VERSION


def test_an_engine_without_work_is_woken() -> None:
    class Engine(core.EngineCoreProc):
        def __init__(self) -> None:  # as far as it makes its tiers
            self.input_queue: queue.Queue[Any] = queue.Queue()
            self.ring = compat.engine_bell()

    engine = Engine()
    waiting = threading.Thread(target=engine.input_queue.get)
    waiting.start()
    engine.ring()
    waiting.join(10)
    assert not waiting.is_alive()
    engine.ring()
    assert engine.input_queue.get_nowait() == (core.EngineCoreRequestType.WAKEUP, None)
    compat.engine_bell()()  # no engine among the callers


def test_vllm_gives_a_tier_no_way_to_wake_its_engine():
    """If this fails, see whether `compat.engine_bell` can go."""
    given = [*inspect.signature(SecondaryTierManager.__init__).parameters]
    assert given == ["self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"]
    offered = {name for name in vars(ParentManager) if not name.startswith("_")}
    assert offered == {"create_store_job", "lookup", "on_new_request", "on_request_finished"}
