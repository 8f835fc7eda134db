"""The faults that tests/e2e/test_faults.py makes while a server is under load; writes docs/user_guide/faults.md from them.

python -m tests.support.faults_page > docs/user_guide/faults.md
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field

__all__ = ["EVENT", "FAULTS", "PATIENCE", "STATUS", "Fault", "text"]

PATIENCE = 20
"""Seconds within which all must know and the server be gone: every 5 vLLM looks whether its engine lives."""
STATUS, EVENT = 500, "InternalServerError"
"""What clients get: a status, or where a stream has begun an event of this type as its last."""


@dataclass(frozen=True)
class Fault:
    """What happens, how it is made (by ``NPU_DEBUG`` or a signal to a process of that title), and the words in the log."""

    what: str
    words: str
    debug: str = ""
    kill: str = ""
    signal: int = signal.SIGKILL
    arguments: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    by_day: bool = False
    """Whether CI makes it."""


# One launch for each of three layers of a step: by then all clients have got some of their 1,900 tokens.
_ATTENTION = "kernel=npu_ops::paged_attention"
_TWO = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "1GiB"}
_ENDED = "was stopped 5 s ago: it is ended, and with it its engine"
FAULTS: dict[str, Fault] = {
    "kernel": Fault(
        "a kernel fails",
        "kernel npu_ops::paged_attention failed on npu:0: fault on demand",
        debug=f"{_ATTENTION}@3000",
        by_day=True,
    ),
    "out-of-memory": Fault("a step finds no memory", "NPU out of memory", debug="oom@20000"),
    "lost": Fault("the device is lost", "npu: device npu:0 is lost", debug=f"lost@3000:{_ATTENTION}"),
    "engine": Fault("the engine is killed", "EngineCore encountered an issue", kill="EngineCore", by_day=True),
    "rank": Fault(
        "a tensor-parallel rank is killed",
        "Worker proc VllmWorker-1 died unexpectedly",
        kill="Worker_TP1",
        arguments=("--tensor-parallel-size", "2"),
        environ=_TWO,
    ),
    "stage": Fault(
        "a pipeline stage is killed",
        "Worker proc VllmWorker-1 died unexpectedly",
        kill="Worker_PP1",
        arguments=("--pipeline-parallel-size", "2"),
        environ=_TWO,
    ),
    "rank-kernel": Fault(
        "a kernel fails on a tensor-parallel rank that does not answer for the step",
        "rank 1 ends, and with it the engine",
        debug=f"{_ATTENTION}@3000:device=1",
        arguments=("--tensor-parallel-size", "2"),
        environ=_TWO,
    ),
    "stage-kernel": Fault(
        "a kernel fails on the first pipeline stage",
        "rank 0 ends, and with it the engine",
        debug=f"{_ATTENTION}@3000:device=0",
        arguments=("--pipeline-parallel-size", "2"),
        environ=_TWO,
    ),
    "rank-stopped": Fault(
        "a tensor-parallel rank is stopped (SIGSTOP)",
        _ENDED,
        kill="Worker_TP1",
        signal=signal.SIGSTOP,
        arguments=("--tensor-parallel-size", "2"),
        environ=_TWO,
    ),
    "stage-stopped": Fault(
        "a pipeline stage is stopped (SIGSTOP)",
        _ENDED,
        kill="Worker_PP1",
        signal=signal.SIGSTOP,
        arguments=("--pipeline-parallel-size", "2"),
        environ=_TWO,
    ),
    "engine-stopped": Fault("the engine is stopped (SIGSTOP)", _ENDED, kill="EngineCore", signal=signal.SIGSTOP),
}

_HEAD = f"""# When something fails

A fault of the device, or the death of a process, ends the server: an engine whose step was cut off does not go on. Every
client is told within {PATIENCE} seconds, nothing stays behind, and the next start serves. `tests/e2e/test_faults.py` makes each
of these under load, and this page is made from its table by `python -m tests.support.faults_page`.

| what | what the log says |
|---|---|
"""
_TAIL = f"""
In each case:

| who | sees |
|---|---|
| a client that waits for an answer | status {STATUS} and `{EVENT}` |
| a client that streams | `{EVENT}` as its last event; the tokens before it are right |
| a new client | no connection any more |
| `/health` | another status than 200, then no connection |
| whoever started the server | all processes are gone; the exit code is 0, as vLLM's API server gives it, so ask `/health` or the log (`EngineDeadError`) |
| the machine | no process, and no shared memory in `/dev/shm`. Where everything is killed at once, server, engine, ranks and Python's process that would remove it (`kill -9` of a process group), vLLM's queues stay: remove `/dev/shm/psm_*` when no vLLM runs |
| the next start | serves |

The other way round, an engine whose server or program was killed (SIGKILL) is asked to end after 5 s, and killed after 10;
vLLM's own would stay, with all its memory.

## Under systemd or Kubernetes

SIGTERM and Ctrl-C end a server that serves: at once, its clients get what was computed so far; with `--shutdown-timeout 20`
its requests have so many seconds to end, and new ones are answered with status 500. What follows is vLLM's own (0.32 and
0.33, by its source) and the same on its CPU build; it was tried with signals to processes, not under systemd or Kubernetes themselves.

- With several API servers, of which there are as many as replicas, requests are cut off in spite of `--shutdown-timeout`: give
  `--api-server-count 1` as well.
- While an engine starts, from `Initializing a V1 LLM engine` in the log until it is up, the first SIGTERM is lost
  (`zmq_socket_ctx` takes it for its own), and the server goes on starting: send it a second time. Ctrl-C is heard when the
  engine is up. Several API servers hear SIGTERM.
- systemd sends SIGTERM to all processes of a unit, engine included, and one that starts ends then beneath a server that has not
  heard of it and waits on: set `KillMode=mixed` and a `TimeoutStopSec=` that you can wait, after which all is killed.
  Kubernetes kills after `terminationGracePeriodSeconds`.
- A server whose engine has died ends with 0: set `Restart=always`.
- Ctrl-C in a terminal reaches the engine as well as the server. With clients that ask again as soon as they are cut off, three
  of eleven such servers (one and two ranks, on npu alone) still waited for their connections 20 s later, with no engine: end
  them by SIGKILL.
- A call that waits for the engine as it dies (`/sleep`, `/wake_up`, `/reset_prefix_cache`) is never answered, and the server,
  which waits for that answer, ends by SIGKILL alone: watch `/health`, which has no connection then.
- Each start leaves some empty sockets, named by a UUID, and a file `vllm_dist_*` in `/tmp`: `PrivateTmp=yes`, or a folder of its
  own in `TMPDIR`.

Several hosts, replicas and Ray: [Many devices, many hosts](many_devices.md#hosts).

A request that asks for too much, or that is wrong, is no fault: it is refused by itself, and the server goes on. Faults on
demand for tests of your own: [Debug and fault modes](debugging.md).
"""


def text() -> str:
    """Return the page."""
    return "".join([_HEAD, *(f"| {fault.what} | `{fault.words}` |\n" for fault in FAULTS.values()), _TAIL])


if __name__ == "__main__":
    sys.stdout.write(text())
