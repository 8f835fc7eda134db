"""How ranks wait for calls: each is executed and answered in its order, the wait sleeps, and it ends with the queue."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import WorkerProc

from npu_platform import compat
from npu_platform.distributed import calls


class Rank:
    """A rank of vLLM's, of which the loop runs in a thread, and the engine's ends of its queues."""

    def __init__(self, *, of_this_host: bool) -> None:
        local = int(of_this_host)
        self.calls, read = joined(MessageQueue(1, local, connect_ip="127.0.0.1"), 0 if of_this_host else -1)
        written = MessageQueue(1, 1)
        _, self.answers = joined(written, 0)
        self.process = WorkerProc.__new__(WorkerProc)
        self.process.__dict__ |= {
            "rpc_broadcast_mq": read,
            "worker_response_mq": written,
            "use_async_scheduling": False,
            "rank": 0,
            "worker": SimpleNamespace(used=time.thread_time, add=lambda one, other: one + other, fail=fail),
        }
        self.ended: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, method: str, *args: Any, timeout: float = 10) -> Any:
        self.calls.enqueue((method, args, {}, None))
        return self.answers.dequeue(timeout=timeout)[1]

    def end(self) -> None:
        self.process.rpc_broadcast_mq.shutdown()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.answers.shutdown()

    def _run(self) -> None:
        try:
            self.process.worker_busy_loop()
        except RuntimeError as error:
            self.ended = error


def joined(writer: MessageQueue, reader_rank: int) -> tuple[MessageQueue, MessageQueue]:
    reader = MessageQueue.create_from_handle(writer.export_handle(), reader_rank)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(writer.wait_until_ready)
        reader.wait_until_ready()
        ready.result(10)
    return writer, reader


def fail() -> None:
    msg = "a call that fails"
    raise ValueError(msg)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank(of_this_host=True)
    yield made
    made.end()


def test_calls_are_answered_in_their_order(rank: Rank) -> None:
    calls.let_ranks_sleep(rank.calls)
    for number in range(40):  # more than the queue has places for
        assert rank.call("add", number, 1) == number + 1
    rank.calls.enqueue(("add", (bytes(1 << 25), b""), {}, None))  # larger than a chunk: it goes through a socket
    rank.calls.enqueue(("add", (1, 2), {}, None))
    assert [rank.answers.dequeue(timeout=10)[1] for _ in range(2)] == [bytes(1 << 25), 3]
    assert rank.call("fail") == "a call that fails"
    assert rank.call("add", 3, 4) == 7


def test_nobody_answers_the_call_that_asks_for_it(rank: Rank) -> None:
    calls.let_ranks_sleep(rank.calls)
    with pytest.raises(TimeoutError):
        rank.answers.dequeue(timeout=0.2)


def test_what_waits_for_a_call_sleeps(rank: Rank) -> None:
    calls.let_ranks_sleep(rank.calls)
    before = rank.call("used")
    time.sleep(0.6)  # vLLM's own wait polls for a second
    assert rank.call("used") - before < 0.15


def test_after_long_it_sleeps_as_vllm_does(rank: Rank) -> None:
    calls.let_ranks_sleep(rank.calls)
    assert rank.call("add", 1, 1) == 2
    time.sleep(1.2)
    assert not compat.polls(rank.process.rpc_broadcast_mq)
    before = time.monotonic()
    assert rank.call("add", 2, 2) == 4
    assert time.monotonic() - before < 1, "the announcement wakes it"


@pytest.mark.parametrize("idle", [0.0, 1.2])
def test_the_loop_ends_with_the_queue(idle: float, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(of_this_host=True)
    calls.let_ranks_sleep(rank.calls)
    assert rank.call("add", 1, 1) == 2
    time.sleep(idle)
    with caplog.at_level(logging.WARNING):
        rank.end()
    assert str(rank.ended) == "cancelled", "as vLLM's own loop ends, which says no more"
    assert not caplog.records


def test_a_rank_of_another_host_is_served() -> None:
    rank = Rank(of_this_host=False)
    calls.let_ranks_sleep(rank.calls)
    assert not compat.polls(rank.process.rpc_broadcast_mq)
    assert [rank.call("add", number, 1) for number in range(5)] == [1, 2, 3, 4, 5]
    rank.calls.enqueue((b"not a call", (), {}, None))
    assert "invalid load key" in rank.answers.dequeue(timeout=10)[1]
    # nothing but its process's end ends what waits on a socket, as in vLLM's loop


def test_none_but_a_rank_serves() -> None:
    with pytest.raises(RuntimeError, match="no rank of vLLM's executors"):
        calls.serve(None)
