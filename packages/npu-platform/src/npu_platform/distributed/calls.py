"""How a rank waits for its engine's calls: asleep, where vLLM's loop polls on a core that others compute on."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from npu_platform import compat

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

RECHECK_SECONDS = 0.001
"""Of a message nearby: ZeroMQ drops what announces the second of two that come within a millisecond."""
LONGEST_RECHECK_SECONDS = 0.064
"""The longer nothing comes, the less often somebody looks: each look takes time of a core that a rank computes on."""
_NOBODY = -1  # the rank that answers


def let_ranks_sleep(queue: MessageQueue) -> None:
    """Have each rank that reads its calls from `queue` serve them by :func:`serve` from now on."""
    queue.enqueue((pickle.dumps(serve), (), {}, _NOBODY))


def serve(_worker: object) -> None:
    """Execute the engine's calls until it ends; itself a call, under the loop of vLLM's that it stands for.

    For a second after each call vLLM 0.32 polls for the next. With as many ranks as cores that second is taken from the
    process that schedules, from the ranks of other engines and from whoever else is on the machine.
    """
    process = compat.process_of_this_call()
    queue = process.rpc_broadcast_mq
    while True:
        try:
            call = next_call(queue)
        except RuntimeError:
            if queue.shutting_down:
                return  # to vLLM's loop, which asks the queue again and ends
            raise
        compat.execute_call(process, call)
        del call  # which may hold memory of the queue


def next_call(queue: MessageQueue) -> Any:
    """Return the next call, having slept until it came.

    Raises RuntimeError when the queue is shut down.
    """
    seconds = RECHECK_SECONDS
    while compat.polls(queue) and not (compat.holds_message(queue) or queue.shutting_down):
        compat.await_message(queue, seconds)
        seconds = longer(seconds)
    return queue.dequeue(indefinite=True)  # it sleeps itself, once it would not poll


def longer(seconds: float) -> float:
    """Return for how long to sleep when nothing came for so many seconds."""
    return min(4 * seconds, LONGEST_RECHECK_SECONDS)
