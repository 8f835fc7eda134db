"""NPUMultiprocExecutor: vLLM's executor; it and its ranks sleep while they wait for each other, and it sees deaths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from npu_platform import compat
from npu_platform.distributed import calls, shares_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self.response_mqs = AllAnswers([*local, *remote])
        if self.rpc_broadcast_mq is not None and shares_cores():
            calls.let_ranks_sleep(self.rpc_broadcast_mq)


class AllAnswers(Sequence["AnswersOfACall"]):
    """The answers of all ranks; stands for the list of their queues.

    vLLM 0.32 stops at the first that is an error, or does not come in time, and would take what the ranks after that
    one answer to the same call for their answers to the next: what they owe is passed over here.
    """

    def __init__(self, queues: Sequence[MessageQueue | LocalAnswers | RemoteAnswers]) -> None:
        self.queues = queues
        self.owed = [0] * len(queues)

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.queues)

    @overload
    def __getitem__(self, rank: int) -> AnswersOfACall: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[AnswersOfACall]: ...
    def __getitem__(self, rank: int | slice) -> AnswersOfACall | Sequence[AnswersOfACall]:
        """Return one rank's, for a call that nobody else answers."""
        if isinstance(rank, slice):
            return [self[number] for number in range(*rank.indices(len(self)))]
        number = range(len(self))[rank]
        return AnswersOfACall(self, number, number)

    def __iter__(self) -> Iterator[AnswersOfACall]:
        """Yield each rank's, for a call that all answer."""
        return (AnswersOfACall(self, rank, len(self) - 1) for rank in range(len(self)))


class AnswersOfACall:
    """A rank's answers, the next of which is to a call that the ranks up to `last` answer."""

    def __init__(self, every: AllAnswers, rank: int, last: int) -> None:
        self._every, self._rank, self._last = every, rank, last

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the next answer that is not to an earlier call; raises what the rank's queue raises."""
        queue, owed = self._every.queues[self._rank], self._every.owed
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while owed[self._rank]:
                queue.dequeue(timeout=_left(deadline))
                owed[self._rank] -= 1
            status, result = queue.dequeue(timeout=_left(deadline))
        except TimeoutError:
            self._leave(self._rank)
            raise
        if status != WorkerProc.ResponseStatus.SUCCESS:
            self._leave(self._rank + 1)
        return status, result

    def shutdown(self) -> None:
        """End the queue."""
        self._every.queues[self._rank].shutdown()

    def _leave(self, first: int) -> None:
        for rank in range(first, self._last + 1):
            self._every.owed[rank] += 1


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
        return self._queue.dequeue(timeout=_left(deadline))

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


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
