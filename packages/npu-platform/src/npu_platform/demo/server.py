"""A `vllm serve` process: start it on a free port, wait until it is ready, ask it over HTTP, stop it with SIGTERM."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from npu_platform.errors import NPUPlatformError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Server", "ServerError", "free_port"]

# A proxy of the environment is not meant for the loopback interface.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_CONNECTIONS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ServerError(NPUPlatformError):
    """The server did not start, died, or refused a request; the message ends with the log's last lines."""


class Server:
    """``vllm serve MODEL`` as a child process in a process group of its own; a context manager that always stops it."""

    def __init__(
        self,
        model: Path | str,
        *arguments: str,
        log: Path,
        name: str = "demo",
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """Describe the server; nothing is started yet.

        `arguments` are further ones of ``vllm serve``; `log` gets all that the server prints; `name` is the model's
        name in requests; `environment` replaces this process's when given; `python` is the interpreter whose
        vLLM serves.
        """
        self.log = log
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.exit_code: int | None = None
        self._command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", name]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the process, again if it was stopped; use :meth:`wait_until_ready` before the first request."""
        self.exit_code = None
        with self.log.open("wb") as log:
            self._process = self._start(log)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the process if it still runs."""
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server, which is also the id of its process group."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def wait_until_ready(self, timeout: float) -> float:
        """Wait until the server answers; return the seconds that took. Raises ServerError if it does not."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout:
            self._require_alive()
            with contextlib.suppress(OSError), _OPENER.open(f"{self.url}/health", timeout=5):
                return time.monotonic() - begin
            time.sleep(0.1)
        msg = f"vllm serve was not ready within {timeout:.0f} s"
        raise self._error(msg)

    def ask(self, path: str, timeout: float = 120.0, **body: Any) -> dict[str, Any]:
        """POST `body` to `path`, such as ``/v1/completions``, and return the answer. Raises ServerError."""
        with self._post(path, body, timeout) as answer:
            result: dict[str, Any] = json.load(answer)
        return result

    def stream(self, path: str, timeout: float = 120.0, **body: Any) -> Iterator[dict[str, Any]]:
        """As :meth:`ask`, with ``stream=True``: yield each event as it arrives."""
        with self._post(path, body | {"stream": True}, timeout) as answer:
            for line in answer:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)

    def stop(self, timeout: float = 30.0) -> bool:
        """Send SIGTERM and wait; return whether it ended by itself within `timeout` seconds, leaving no process behind.

        What is left after that is killed. Stopping a stopped server returns True.
        """
        if self._process is None or self.exit_code is not None:
            return True
        self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        while self.processes_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        clean = not self.processes_alive()
        if not clean:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.exit_code = self._process.wait()
        return clean

    def processes_alive(self) -> list[int]:
        """Return the ids of the living processes that the server started, itself included."""
        alive = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # Fields after the name in parentheses: state, parent, process group.
                state, _, group = status.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid and state != "Z":
                    alive.append(int(status.parent.name))
        return alive

    def log_tail(self, lines: int = 30) -> str:
        """Return the log's last lines."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
        )

    def _post(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        data = json.dumps({"model": self.name, **body}).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        try:
            return _OPENER.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            msg = f"{path} answered {error.code}: {answer}"
            raise self._error(msg) from error
        except OSError as error:
            msg = f"{path} did not answer: {error}"
            raise self._error(msg) from error

    def _require_alive(self) -> None:
        assert self._process is not None, "the server was not started"
        code = self._process.poll()
        if code is not None:
            msg = f"vllm serve ended with code {code}"
            raise self._error(msg)

    def _error(self, sentence: str) -> ServerError:
        return ServerError(f"{sentence}. Last lines of {self.log}:\n{self.log_tail()}")


def free_port() -> int:
    """Return a port of this host that nothing listens on, nor a connection of somebody's takes before a server does.

    The system gives connections the ports of a range; it is one below them, where there are some.
    """
    lowest = int(_CONNECTIONS_PORTS.read_text().split()[0]) if _CONNECTIONS_PORTS.exists() else 0
    while True:
        port = random.SystemRandom().randrange(10_000, lowest) if lowest > 12_000 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
