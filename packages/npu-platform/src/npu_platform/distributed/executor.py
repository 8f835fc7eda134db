"""NPUMultiprocExecutor: vLLM's executor; it and its ranks sleep while they wait for each other, and it sees deaths."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from npu_platform import compat
from npu_platform.distributed import calls, shares_cores

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

LOOK_SECONDS = 1.0


class NPUMultiprocExecutor(MultiprocExecutor):
    """vLLM's executor, which waits otherwise.

    For a rank of this host vLLM 0.32 polls, for a second after each answer: the whole of every step, on a core that
    the ranks of the software NPU compute on. Here it sleeps until the answer comes, and they until the next call does.

    The wait for a rank of another host ends when a rank of this one has died. A host that is gone ends the first rank
    of this one (see ``host_watch``). vLLM sees that and shuts down, but what waits for the other host's answer goes on
    waiting, for ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``.
    """

    def _post_init_executor(self) -> None:
        here = self.local_world_size
        local = [LocalAnswers(queue) for queue in self.response_mqs[:here]]
        remote = [RemoteAnswers(queue, self) for queue in self.response_mqs[here:]]
        self.response_mqs = [*local, *remote]
        if self.rpc_broadcast_mq is not None and shares_cores():
            calls.let_ranks_sleep(self.rpc_broadcast_mq)


class LocalAnswers:
    """The answers of a rank of this host; stands for its ``MessageQueue``."""

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the next answer, having slept until it came.

        Raises TimeoutError after `timeout` seconds, and RuntimeError when the queue is shut down.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        seconds = calls.RECHECK_SECONDS
        while not (compat.holds_message(self._queue) or self._queue.shutting_down):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            compat.await_message(self._queue, seconds)
            seconds = calls.longer(seconds)
        return self._queue.dequeue(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))

    def shutdown(self) -> None:
        """End the queue."""
        self._queue.shutdown()


class RemoteAnswers:
    """The answers of a rank that others watch, of another host or of Ray's; stands for its ``MessageQueue``."""

    def __init__(self, queue: MessageQueue | LocalAnswers, executor: MultiprocExecutor) -> None:
        self._queue, self._executor = queue, executor

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the next answer.

        Raises TimeoutError after `timeout` seconds, and RuntimeError soon after the executor has failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            try:
                return self._queue.dequeue(timeout=min(LOOK_SECONDS, max(0.0, left)))
            except TimeoutError:
                if self._executor.is_failed:
                    msg = (
                        "a rank of this engine has died, or its host: the log above says which; start the engine again."
                    )
                    raise RuntimeError(msg) from None
                if left <= 0:
                    raise

    def shutdown(self) -> None:
        """End the queue."""
        self._queue.shutdown()
