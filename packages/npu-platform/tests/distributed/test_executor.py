"""Answers of a rank of another host: they come, or time out, or end soon after the executor has failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from npu_platform.distributed import EXECUTOR, choose_executor, is_multiprocessing
from npu_platform.distributed.executor import RemoteAnswers


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


def test_engines_on_several_hosts_have_this_executor() -> None:
    several = ParallelConfig(nnodes=2, tensor_parallel_size=2, distributed_executor_backend="mp")
    one = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp")
    for parallel in (several, one):
        choose_executor(parallel)
        assert is_multiprocessing(parallel)
    assert (several.distributed_executor_backend, one.distributed_executor_backend) == (EXECUTOR, "mp")
