"""StopWatch: a process of an engine that is stopped (SIGSTOP) is ended, and an engine whose program or server is gone.

vLLM sees when a process of an engine has died. One that stands still is waited for: a rank for
``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``, an engine for ever, while ``/health`` says 200. And an engine waits for requests
for ever, with all its memory, where the process that started it was killed. None of them can say so itself:
a small process beside them looks at their states in /proc. It is this file, run by itself, and imports nothing else.

A host that is stopped as a whole, and this process with it, keeps its connections: its system answers for it. So the
processes of an engine's hosts send each other a byte at each look, and one that hears nothing ends the ranks beside it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

__all__ = ["Place", "StopWatch", "belongs_to_an_engine", "here", "look_after", "on_my_host", "starter_of"]

LOOK_SECONDS = 1.0
SILENCES = 3
"""How many times as long another host may be silent as a process may be stopped, which is seen and not guessed."""
_BEAT = b"."
_STOPPED = "T"  # a debugger's stop is "t"
_ENGINE = "VLLM::EngineCor"  # as much of its title as the system keeps


class Place(NamedTuple):
    """Where a rank runs: which boot of which host, which namespace of process ids, which replica, and its process."""

    host: str
    processes: str
    replica: int
    process: int


def here(replica: int) -> Place:
    """Return the place of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(boot, str(Path("/proc/self/ns/pid").readlink()), replica, os.getpid())


def on_my_host(mine: Place, of_all: Sequence[Place]) -> list[int]:
    """Return the processes of this replica's ranks on this host."""
    return [place.process for place in of_all if place[:3] == mine[:3]]


def belongs_to_an_engine() -> bool:
    """Say whether vLLM started this process; one that the user started is not to be ended by others."""
    return multiprocessing.parent_process() is not None


def starter_of(engine: int) -> int:
    """Return the process that started an engine; 0: it is none of vLLM's, but a program that a user started."""
    name, _, parent = _stat(engine)
    return parent if name == _ENGINE else 0


class StopWatch:
    """The process that looks after others until the first of these has ended.

    It is no child of theirs: vLLM's server, which kills an engine that does not end at once, asks each of the engine's
    children for its name first, and hangs for ever where one ends just then, as this does in an engine's end.
    """

    def __init__(
        self, processes: Sequence[int], seconds: int, starter: int = 0, hosts: Sequence[socket.socket] = ()
    ) -> None:
        """Start it; it ends who stands still for so many seconds, and the first when its starter is gone as long.

        `hosts`: connections to the watches of other hosts, which are its own from now on. Where one of them is silent,
        all processes but the first, the engine, are ended.
        """
        beats = [host.fileno() for host in hosts]
        numbers = (seconds, starter, len(beats), *beats, *processes)
        command = [sys.executable, "-I", "-S", __file__, *map(str, numbers)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, pass_fds=beats) as parent:  # noqa: S603
            assert parent.stdout is not None
            self.process = int(parent.stdout.readline())
            self._descriptor = os.pidfd_open(self.process)
        for host in hosts:
            host.close()

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Say whether it has ended, or does within so many seconds."""
        return bool(select.select([self._descriptor], (), (), timeout)[0])

    def close(self) -> None:
        """End it; not to be used after that."""
        _send(self._descriptor, signal.SIGKILL)
        select.select([self._descriptor], (), ())
        os.close(self._descriptor)


def look_after(processes: Sequence[int], seconds: int, starter: int = 0, hosts: Sequence[socket.socket] = ()) -> None:
    """Kill each of the processes that is found stopped so many times in a row, a second apart.

    The first is asked to end when its starter (0: none) has been gone for as many looks, and killed after twice as
    many; the others are killed when one of `hosts` has been silent for `SILENCES` times as many. Returns when the first
    of them has ended. Looks are counted and not time, so that a machine, or a whole server, that was stopped may go on.
    """
    watched: dict[int, int] = {}
    with contextlib.suppress(ProcessLookupError):
        for process in processes:
            watched[os.pidfd_open(process)] = process
    found = dict.fromkeys(watched, 0)
    first, alone = next(iter(watched), None), 0
    others = [Host(host) for host in hosts]
    while first in watched:
        for ended in select.select(watched, (), (), LOOK_SECONDS)[0]:
            del watched[ended]
        for descriptor, process in watched.items():
            _, state, parent = _stat(process)
            found[descriptor] = found[descriptor] + 1 if state == _STOPPED else 0
            if found[descriptor] == seconds:
                _say(f"npu: process {process} was stopped {seconds} s ago: it is ended, and with it its engine")
                _send(descriptor, signal.SIGKILL)
            if descriptor == first and starter not in (0, parent):
                alone += 1
                if alone == seconds:
                    _say(f"npu: process {starter} is gone, which started the engine {process}: it is ended")
                if alone in (seconds, 2 * seconds):
                    _send(descriptor, signal.SIGTERM if alone == seconds else signal.SIGKILL)
        _listen(others, SILENCES * seconds, watched.keys() - {first})


def _listen(hosts: Sequence[Host], looks: int, ranks: AbstractSet[int]) -> None:
    """Kill the ranks when one of the hosts has been silent at so many looks."""
    for host in hosts:
        if host.silent_for() == looks:
            _say(f"npu: host {host.name} says nothing for {looks} s: the ranks here, and the engine, end")
            for rank in ranks:
                _send(rank, signal.SIGKILL)


class Host:
    """Another host, to whose watch this one is connected."""

    def __init__(self, connection: socket.socket) -> None:
        """Speak and listen without waiting."""
        self.name = ""
        with contextlib.suppress(OSError):  # it has ended before
            self.name = str(connection.getpeername()[0])
        self._connection: socket.socket | None = connection
        self._silent = 0
        connection.setblocking(False)

    def silent_for(self) -> int:
        """Send it a byte, and return at how many looks in a row none came; 0 for ever when its watch has ended."""
        if self._connection is None:
            return 0
        self._silent += 1
        try:
            self._connection.send(_BEAT)
        except BlockingIOError:  # it has not taken thousands
            pass
        except OSError:
            return self._ended()
        try:
            heard = self._connection.recv(1 << 16)
        except BlockingIOError:
            return self._silent
        except OSError:
            return self._ended()
        self._silent = 0
        return 0 if heard else self._ended()

    def _ended(self) -> int:
        """Leave it to others (``host_watch``) that the host is gone."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        return 0


def _send(descriptor: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def _stat(process: int) -> tuple[str, str, int]:
    """Return the name, the state and the parent of a process, "X" and 0 once it has ended."""
    try:
        name, _, fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    except OSError:
        return "", "X", 0
    state, parent = fields.split()[:2]
    return name.partition("(")[2], state, int(parent)


def _say(message: str) -> None:
    """Write into the log of whoever started this."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def _main(seconds: int, starter: int, hosts: int, *numbers: int) -> None:
    """Look after them in a child, which is nobody's once this process has told which it is and ended."""
    child = os.fork()
    if child == 0:
        look_after(numbers[hosts:], seconds, starter, [socket.socket(fileno=beat) for beat in numbers[:hosts]])
        return
    sys.stdout.write(f"{child}\n")


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
