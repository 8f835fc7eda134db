"""Runs Python programs in forks of a process that has imported what they need: a fresh import costs seconds each.

``ForkServer`` is for tests; the module's main is the process that forks: ``python forks.py SOCKET MODULE...``. A fork is
as good as a fresh process for whatever is read or made after the imports: environment, devices, threads, files. It ends
with its exit handlers, but does not take the interpreter apart, which would cost torch a second.

The workers of a run of pytest share a server to which they give the same name: the first one makes it, and it ends when
the last one has hung up.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Fork", "ForkServer"]

LIMIT = 1 << 20  # bytes of a request or reply
PR_SET_PDEATHSIG = 1  # linux/prctl.h
RUN = "PYTEST_XDIST_TESTRUNUID"
"""Names the run, in its workers."""
_shared: list[subprocess.Popen[bytes]] = []


class ForkServer:
    """A process that has imported `modules` with exactly the environment `environ`; ends with its owners.

    With a `name`, workers of a run of pytest share it; all of them must ask for the same. Its methods may be called from
    several threads.
    """

    def __init__(self, *modules: str, environ: Mapping[str, str] | None = None, name: str | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if name is not None and RUN in os.environ:
            self._socket = _join(f"{os.environ[RUN]} {name}", modules, environ)
        else:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = _start(theirs, modules, environ)
        self._turn = threading.Lock()  # a request and its reply belong together
        weakref.finalize(self, _end, self._socket, self._process)

    def start(
        self,
        program: str,
        *arguments: str,
        environ: Mapping[str, str],
        stdin: IO[Any] | None = None,
        stdout: IO[Any],
        stderr: IO[Any],
        new_session: bool = False,
    ) -> Fork:
        """Run a program, as ``python -c`` does, with `environ` in place of the environment of the imports.

        With `new_session` it leads a session and a process group of its own.
        """
        asked = {"program": program, "arguments": arguments, "environ": dict(environ), "new_session": new_session}
        request = json.dumps(asked).encode()
        assert len(request) < LIMIT
        with Path(os.devnull).open("rb") as nothing, self._turn:
            files = [nothing if stdin is None else stdin, stdout, stderr]
            socket.send_fds(self._socket, [request], [file.fileno() for file in files])
            return Fork(self, int(self._reply()))

    def run(
        self, program: str, *arguments: str, environ: Mapping[str, str], timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end and capture what it writes. Raises TimeoutExpired after `timeout` seconds."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            fork = self.start(program, *arguments, environ=environ, stdout=stdout, stderr=stderr)
            try:
                status = fork.wait(timeout)
            except subprocess.TimeoutExpired:
                fork.kill()
                fork.wait()
                raise
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess([program, *arguments], status, stdout.read(), stderr.read())

    def wait(self, pid: int) -> int:
        """Return the exit status of a fork when it has ended: a negative one names the signal."""
        with self._turn:
            self._socket.send(json.dumps({"wait": pid}).encode())
            return int(self._reply())

    def _reply(self) -> bytes:
        reply = self._socket.recv(LIMIT)
        if not reply:
            msg = f"the server of forks is gone, with status {self._process and self._process.wait()}"
            raise RuntimeError(msg)
        return reply


@dataclass
class Fork:
    """A running program, with methods of ``subprocess.Popen``."""

    server: ForkServer
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal. Raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
            if not ended:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = self.server.wait(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it by SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def serve(first: socket.socket) -> None:
    """Answer requests of an owner, or of all that come to a listening socket, until the last one hangs up."""
    with selectors.DefaultSelector() as owners:
        owners.register(first, selectors.EVENT_READ)
        is_shared = bool(first.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        while True:
            for key, _ in owners.select():
                owner: Any = key.fileobj
                if is_shared and owner is first:
                    owners.register(first.accept()[0], selectors.EVENT_READ)
                elif not _answer(owner, owners):
                    owners.unregister(owner)
                    owner.close()
                    if len(owners.get_map()) == is_shared:
                        if is_shared:
                            Path(first.getsockname()).unlink(missing_ok=True)
                        return


def _answer(owner: socket.socket, owners: selectors.BaseSelector) -> bool:
    """Answer a request of an owner; return False where it has hung up."""
    request, files, _, _ = socket.recv_fds(owner, LIMIT, 3)
    if not request:
        return False
    asked = json.loads(request)
    if "wait" in asked:
        _, status = os.waitpid(asked["wait"], 0)
        owner.send(str(os.waitstatus_to_exitcode(status)).encode())
    elif pid := os.fork():
        for file in files:
            os.close(file)
        owner.send(str(pid).encode())
    else:
        for key in [*owners.get_map().values()]:
            key.fileobj.close()  # type: ignore[union-attr]
        owners.close()
        status = 1
        try:
            status = _run(files, **asked)
        finally:
            os._exit(status)
    return True


def _start(
    theirs: socket.socket, modules: tuple[str, ...], environ: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, str(theirs.fileno()), *modules]
    started = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    return started


def _join(name: str, modules: tuple[str, ...], environ: Mapping[str, str] | None) -> socket.socket:
    """Connect to the server of that name, or start it."""
    folder = Path(tempfile.gettempdir(), f"npu-forks-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    address = folder / hashlib.sha256(name.encode()).hexdigest()[:16]
    with _lock(folder / "lock"):
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.connect(str(address))
        except OSError:  # there is none yet, or it has ended
            address.unlink(missing_ok=True)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listening.bind(str(address))
            listening.listen()
            ours.connect(str(address))
            _shared.append(_start(listening, modules, environ))
    return ours


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _run(files: list[int], program: str, arguments: list[str], environ: dict[str, str], new_session: bool) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # owners that are killed leave no servers behind
    if new_session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[:] = ["-c", *arguments]
    sys.path[0] = ""
    main = sys.modules["__main__"] = type(sys)("__main__")
    status = 0
    try:
        exec(compile(program, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 as the interpreter does
        traceback.print_exc()
        status = 1
    threading._shutdown()  # waits for threads, as the interpreter does before its exit handlers
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _end(control: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
    control.close()
    if process is not None:
        process.wait()


if __name__ == "__main__":
    gc.disable()  # all that is imported stays
    for module in sys.argv[2:]:
        importlib.import_module(module)
    with contextlib.suppress(ImportError):
        # looks for the place of a process's title, which it would not find once the environment is another
        importlib.import_module("setproctitle").getproctitle()
    gc.freeze()  # a fork that looked through it all would copy it
    gc.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
