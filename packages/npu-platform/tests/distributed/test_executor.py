"""Answers of ranks: they come, or time out, or end soon after the executor has failed; what waits for them sleeps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import WorkerProc

from npu_platform import compat
from npu_platform.distributed import EXECUTOR, choose_executor, is_multiprocessing
from npu_platform.distributed.executor import AllAnswers, LocalAnswers, RemoteAnswers

SUCCESS, FAILURE = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


@pytest.fixture(scope="module")
def pair() -> tuple[MessageQueue, MessageQueue]:
    """A queue of vLLM as between two hosts: what writes and what reads."""
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), -1)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(writer.wait_until_ready)
        reader.wait_until_ready()
        ready.result(10)
    return writer, reader


def answers(reader: MessageQueue, *, failed: bool = False) -> RemoteAnswers:
    executor: Any = SimpleNamespace(is_failed=failed)
    return RemoteAnswers(reader, executor)


def test_an_answer_comes(pair: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = pair
    writer.enqueue(("well", 7))
    assert answers(reader).dequeue(timeout=10) == ("well", 7)
    writer.enqueue("without a limit")
    assert answers(reader, failed=True).dequeue() == "without a limit"


def test_the_limit_is_kept(pair: tuple[MessageQueue, MessageQueue]) -> None:
    with pytest.raises(TimeoutError):
        answers(pair[1]).dequeue(timeout=0.01)


def test_the_wait_ends_with_the_executor(pair: tuple[MessageQueue, MessageQueue]) -> None:
    with pytest.raises(RuntimeError, match="a rank of this engine has died"):
        answers(pair[1], failed=True).dequeue(timeout=300)


class Said(deque[Any]):
    """What a rank has answered, in the place of its queue."""

    def dequeue(self, timeout: float | None = None) -> Any:
        if not self:
            raise TimeoutError(timeout)
        return self.popleft()


def asked_of_all(every: AllAnswers) -> list[Any]:
    """Return the answers of all ranks, as vLLM takes them: up to the first that is an error."""
    taken = []
    for answers in every:
        status, result = answers.dequeue(timeout=0)
        taken.append(result)
        if status != SUCCESS:
            break
    return taken


def test_an_error_of_a_rank_leaves_nothing_to_the_next_call() -> None:
    ranks = [Said(), Said(), Said()]
    every: Any = AllAnswers(ranks)  # type: ignore[arg-type]
    for call in ("wrong", "wrong again", "right"):
        for number, rank in enumerate(ranks):
            rank.append((FAILURE if call != "right" and number > 0 else SUCCESS, f"{call} {number}"))
    assert asked_of_all(every) == ["wrong 0", "wrong 1"]
    assert asked_of_all(every) == ["wrong again 0", "wrong again 1"]
    assert asked_of_all(every) == ["right 0", "right 1", "right 2"]
    ranks[0].append((FAILURE, "alone"))
    assert every[0].dequeue() == (FAILURE, "alone"), "of a call that one rank answers"
    for rank in ranks:
        rank.append((SUCCESS, "after"))
    assert asked_of_all(every) == ["after"] * 3


def test_an_answer_that_comes_too_late_is_not_the_next_calls() -> None:
    ranks = [Said(), Said()]
    every: Any = AllAnswers(ranks)  # type: ignore[arg-type]
    ranks[0].append((SUCCESS, "in time"))
    with pytest.raises(TimeoutError):
        asked_of_all(every)
    ranks[1].append((SUCCESS, "late"))
    for rank in ranks:
        rank.append((SUCCESS, "next"))
    assert asked_of_all(every) == ["next", "next"]
    with pytest.raises(TimeoutError):
        every[1].dequeue(timeout=0)
    ranks[1].extend([(SUCCESS, "late"), (SUCCESS, "next")])
    assert every[-1].dequeue() == (SUCCESS, "next")


@pytest.fixture
def local() -> Iterator[tuple[MessageQueue, LocalAnswers]]:
    """A queue of vLLM as between two processes of a host: what writes, and what waits for it."""
    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 16)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(writer.wait_until_ready)
        reader.wait_until_ready()
        ready.result(10)
    answers = LocalAnswers(reader)
    yield writer, answers
    answers.shutdown()
    writer.shutdown()


def test_answers_of_this_host_come_in_their_order(local: tuple[MessageQueue, LocalAnswers]) -> None:
    writer, answers = local
    for number in range(3):  # before anybody waits: one notification is left of three
        writer.enqueue(number)
    assert [answers.dequeue(timeout=10), answers.dequeue(), answers.dequeue(timeout=10)] == [0, 1, 2]
    with pytest.raises(TimeoutError):
        answers.dequeue(timeout=0.01)
    writer.enqueue(bytes(1 << 20))  # larger than a chunk: it goes through a socket
    assert answers.dequeue(timeout=10) == bytes(1 << 20)


def test_what_waits_for_this_host_sleeps(local: tuple[MessageQueue, LocalAnswers]) -> None:
    writer, answers = local
    writer.enqueue("recent")  # after which vLLM's own wait polls for a second
    assert answers.dequeue(timeout=10) == "recent"
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(lambda: (time.sleep(0.5), writer.enqueue("later")))
        before = time.thread_time()
        assert answers.dequeue(timeout=10) == "later"
        assert time.thread_time() - before < 0.1
        later.result(10)


def test_the_longer_an_answer_takes_the_less_often_somebody_looks(
    local: tuple[MessageQueue, LocalAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, answers = local
    slept: list[float] = []

    def await_message(queue: MessageQueue, seconds: float) -> None:
        slept.append(seconds)
        awaited(queue, seconds)

    awaited = compat.await_message
    monkeypatch.setattr(compat, "await_message", await_message)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            slept.clear()
            later = pool.submit(lambda: (time.sleep(0.2), writer.enqueue("later")))
            assert answers.dequeue(timeout=10) == "later"
            later.result(10)
            assert slept[:4] == [0.001, 0.004, 0.016, 0.064]
            assert len(slept) < 8, "each look takes time of a core that a rank computes on"


def test_a_message_that_was_not_announced_is_found(
    local: tuple[MessageQueue, LocalAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ drops the announcement of one that follows another at once."""
    writer, answers = local
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: (answers.dequeue(timeout=10), answers.dequeue(timeout=10)))
        time.sleep(0.1)
        writer.enqueue("announced")
        with monkeypatch.context() as silent:
            silent.setattr(writer._spin_condition, "notify", lambda: None)
            writer.enqueue("not announced")
        assert waiting.result(5) == ("announced", "not announced")


def test_the_wait_for_this_host_ends_with_the_queue(local: tuple[MessageQueue, LocalAnswers]) -> None:
    _, answers = local
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answers.dequeue)
        time.sleep(0.1)
        answers.shutdown()
        with pytest.raises(RuntimeError, match="cancelled"):
            waiting.result(10)


@pytest.mark.parametrize(
    ("parallel", "connector", "chosen"),
    [
        ({"nnodes": 2}, None, EXECUTOR),
        ({}, None, EXECUTOR),
        ({}, "OffloadingConnector", "mp"),
        ({}, "NPUOffloadConnector", EXECUTOR),
        ({}, "NPUNixlConnector", EXECUTOR),
        ({"pipeline_parallel_size": 2}, None, EXECUTOR),
    ],
)
def test_whose_ranks_are_started_by_this_executor(parallel: dict[str, Any], connector: str | None, chosen: str) -> None:
    config = VllmConfig()
    config.parallel_config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp", **parallel)
    if connector:
        config.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    choose_executor(config)
    assert config.parallel_config.distributed_executor_backend == chosen
    assert is_multiprocessing(config.parallel_config)


@pytest.mark.parametrize(
    ("parts", "chosen"),
    [(("NixlConnector", "NPUOffloadConnector"), EXECUTOR), (("NixlConnector", "OffloadingConnector"), "mp")],
)
def test_of_connectors_made_of_others_each_is_asked(parts: tuple[str, ...], chosen: str) -> None:
    config = VllmConfig()
    config.parallel_config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp")
    connectors = [{"kv_connector": name, "kv_role": "kv_both"} for name in parts]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": connectors}
    )
    choose_executor(config)
    assert config.parallel_config.distributed_executor_backend == chosen
