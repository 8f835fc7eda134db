"""StopWatch: a process of an engine that is stopped (SIGSTOP) is ended, and an engine whose program or server is gone.

vLLM sees when a process of an engine has died. One that stands still is waited for: a rank for
``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``, an engine for ever, while ``/health`` says 200. And an engine waits for requests
for ever, with all its memory, where the process that started it was killed. None of them can say so itself:
a small process beside them looks at their states in /proc. It is this file, run by itself, and imports nothing else.

A host that is stopped as a whole, and this process with it, keeps its connections: its system answers for it. So the
processes of an engine's hosts send each other a byte at each look, and one that hears nothing ends the ranks beside it.
Replicas of a dense model have no connections among them, and vLLM's server looks only after those of its own host: they
send datagrams to each other, and the server's own ends when one of the others has, or says nothing.
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
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

__all__ = [
    "Place",
    "StopWatch",
    "belongs_to_an_engine",
    "first_on_each_host",
    "here",
    "look_after",
    "on_my_host",
    "starter_of",
]

LOOK_SECONDS = 1.0
SILENCES = 3
"""How many times as long another host may be silent as a process may be stopped, which is seen and not guessed."""
_BEAT, _END = b".", b"!"
_TOKEN_BYTES = 8
_AT_ONCE = 1000
_CLOSE = signal.SIGUSR1
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


def first_on_each_host(of_all: Sequence[Place]) -> list[int]:
    """Return the first rank of each host, whatever its replica."""
    first: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(of_all):
        first.setdefault((place.host, place.processes), rank)
    return list(first.values())


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
        self,
        processes: Sequence[int],
        seconds: int,
        starter: int = 0,
        hosts: Sequence[socket.socket] = (),
        ranks_from: int = 1,
    ) -> None:
        """Start it; it ends who stands still for so many seconds, and the first when its starter is gone as long.

        `hosts`: connections to the watches of other hosts, or a socket for datagrams to those of other replicas, which
        are its own from now on. Where one of them is silent, the processes from this one on are ended: all but the
        first, the engine, which ends by itself or is killed soon after, or all.
        """
        beats = [host.fileno() for host in hosts]
        numbers = (seconds, starter, ranks_from, len(beats), *beats, *processes)
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
        _send(self._descriptor, _CLOSE)  # so that it says so to other replicas
        if not self.has_ended(LOOK_SECONDS):
            _send(self._descriptor, signal.SIGKILL)
        select.select([self._descriptor], (), ())
        os.close(self._descriptor)


def look_after(
    processes: Sequence[int], seconds: int, starter: int = 0, hosts: Sequence[Host | Replicas] = (), ranks_from: int = 1
) -> None:
    """Kill each of the processes that is found stopped so many times in a row, a second apart.

    The first is asked to end when its starter (0: none) has been gone for as many looks, and killed after twice as
    many; those from `ranks_from` on are killed when one of `hosts` has been silent for `SILENCES` times as many, and
    the first `seconds` looks after those: it may wait for the engine of that host, by a connection of their own.
    Returns when the first of them has ended. Looks are counted and not time, so that a machine, or a whole server, that
    was stopped may go on.
    """
    watched: dict[int, int] = {}
    with contextlib.suppress(ProcessLookupError):
        for process in processes:
            watched[os.pidfd_open(process)] = process
    found = dict.fromkeys(watched, 0)
    first, alone, bereft, ranks = next(iter(watched), None), 0, 0, list(watched)[ranks_from:]
    while first in watched:
        ended = select.select(watched, (), (), LOOK_SECONDS)[0]
        for descriptor in ended:
            del watched[descriptor]
        _end_stopped(watched, found, seconds)
        if first in watched and starter not in (0, _stat(watched[first])[2]):
            alone += 1
            if alone == seconds:
                _say(f"npu: process {starter} is gone, which started the engine {watched[first]}: it is ended")
            if alone in (seconds, 2 * seconds):
                _send(first, signal.SIGTERM if alone == seconds else signal.SIGKILL)
        if _listen(hosts, SILENCES * seconds, watched.keys() & set(ranks)) or (bereft and not ended):
            bereft += 1
        if first in watched and bereft == seconds + 1:
            _say(f"npu: the engine {watched[first]} has not ended {seconds} s after its ranks: it is killed")
            _send(first, signal.SIGKILL)


def _end_stopped(watched: dict[int, int], found: dict[int, int], seconds: int) -> None:
    """Kill who is found stopped for so many times in a row; `watched`: processes by descriptor, `found`: how often."""
    for descriptor, process in watched.items():
        found[descriptor] = found[descriptor] + 1 if _stat(process)[1] == _STOPPED else 0
        if found[descriptor] == seconds:
            _say(f"npu: process {process} was stopped {seconds} s ago: it is ended, and with it its engine")
            _send(descriptor, signal.SIGKILL)


def _listen(hosts: Sequence[Host | Replicas], looks: int, ranks: AbstractSet[int]) -> bool:
    """Kill the ranks when one of the hosts has been silent at so many looks, or has ended where that is told.

    Returns whether that is so.
    """
    gone = [what for host in hosts if (what := host.gone(looks))]
    for what in gone:
        _say(f"npu: {what}: the ranks here, and the engine, end")
        for rank in ranks:
            _send(rank, signal.SIGKILL)
    return bool(gone)


class Host:
    """Another host, to whose watch this one is connected."""

    def __init__(self, connection: socket.socket) -> None:
        """Speak and listen without waiting."""
        self.name = ""
        with contextlib.suppress(OSError):  # it has ended before
            self.name = str(connection.getpeername()[0])
        self._connection: socket.socket | None = connection
        self._silent, self._has_spoken = 0, False
        connection.setblocking(False)

    def gone(self, looks: int) -> str:
        """Send it a byte, and say so when none came at so many looks in a row, be it that its watch has ended.

        One that has ended is left to others at first: its engine ends, or ``host_watch`` notices.
        """
        if self._silent_for() != looks:
            return ""
        return f"host {self.name} {f'says nothing for {looks} s' if self._connection else f'ended {looks} s ago'}"

    def close(self) -> None:
        """End the connection."""
        self._ended()

    def _silent_for(self) -> int:
        """Return at how many looks in a row nothing came; 0 for ever when it had no watch from the beginning."""
        self._silent += 1
        if self._connection is None:
            return self._silent if self._has_spoken else 0
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
        if not heard:
            return self._ended()
        self._silent, self._has_spoken = 0, True
        return 0

    def _ended(self) -> int:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._silent = None, 0
        return 0


class Replicas:
    """Replicas on other hosts, by datagrams: that of the server's host hears all others, and they hear that one.

    It begins with the first that comes, so that a network without datagrams ends nobody. The server's replica has a
    token, which the others send back, so that none that an earlier server has left counts with a later one.
    """

    def __init__(self, own: socket.socket) -> None:
        """Speak and listen without waiting, by a socket that is connected on all hosts but the server's."""
        self._own = own
        self._home: Any = None
        with contextlib.suppress(OSError):
            self._home = own.getpeername()
        self._token = b"" if self._home else os.urandom(_TOKEN_BYTES)
        self._silent: dict[Any, int] = {}  # by their addresses
        self._newcomer: Any = None  # the last that had no token yet
        own.setblocking(False)

    def gone(self, looks: int) -> str:
        """Speak to all; say which one has ended, or said nothing at so many looks in a row: it is forgotten."""
        for peer in {*self._silent, self._home} - {None}:
            self._speak(_BEAT, peer)
        self._silent = {peer: silent + 1 for peer, silent in self._silent.items()}
        ended = dict.fromkeys(peer for word, peer in self._heard() if word == _END)
        late = [peer for peer, silent in self._silent.items() if silent >= looks]
        for peer in (*ended, *late):
            self._silent.pop(peer, None)
        said = [f"the replica at {_host_of(peer)} has ended" for peer in ended]
        said += [f"the replica at {_host_of(peer)} says nothing for {looks} s" for peer in late if peer not in ended]
        return ", ".join(said)

    def close(self) -> None:
        """Tell all that this one ends."""
        for peer in {*self._silent, self._newcomer} - {None}:
            self._speak(_END, peer)
        self._own.close()

    def _heard(self) -> Iterator[tuple[bytes, Any]]:
        """Yield what came of those that count, and of whom."""
        for _ in range(_AT_ONCE):
            try:
                said, peer = self._own.recvfrom(64)
            except BlockingIOError:
                return
            except OSError:  # what it sent before has reached nobody
                continue
            word, token = said[:1], said[1:]
            if self._home is None and token != self._token:
                self._speak(_BEAT, peer)  # it learns the token so, or that its own server is no more
                self._newcomer = peer
                continue
            if not self._token:
                self._token = token
                self._speak(_BEAT, peer)
            elif token != self._token:
                word = _END  # another server is where its own was
            self._silent[peer] = 0
            yield word, peer

    def _speak(self, word: bytes, peer: Any) -> None:
        with contextlib.suppress(OSError):  # no way there at present
            if self._home is None:
                self._own.sendto(word + self._token, peer)
            else:
                self._own.send(word + self._token)


def _host_of(peer: Any) -> str:
    return str(peer[0])


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


def _main(seconds: int, starter: int, ranks_from: int, hosts: int, *numbers: int) -> None:
    """Look after them in a child, which is nobody's once this process has told which it is and ended."""
    child = os.fork()
    if child == 0:
        for number in (signal.SIGINT, signal.SIGTERM):  # as a whole group gets it: the engine may take its time
            signal.signal(number, signal.SIG_IGN)
        signal.signal(_CLOSE, lambda *_: sys.exit())
        sockets = [socket.socket(fileno=number) for number in numbers[:hosts]]
        others = [Replicas(own) if own.type == socket.SOCK_DGRAM else Host(own) for own in sockets]
        try:
            look_after(numbers[hosts:], seconds, starter, others, ranks_from)
        finally:
            for other in others:
                other.close()
        return
    sys.stdout.write(f"{child}\n")


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
