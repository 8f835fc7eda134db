"""Ranks of a process group that tests drive step by step: each is a process that runs the code it is sent."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.support.forks import Fork, ForkServer

PATIENCE = 120  # seconds until a rank that does not answer has hung

RANK = """
import json, os, sys
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no reply
from datetime import timedelta
import torch
import torch.distributed as dist
rank, size, path, timeout = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
torch.npu.set_device(rank)
scope = dict(torch=torch, dist=dist, timedelta=timedelta, rank=rank, size=size)
for line in sys.stdin:
    reply = dict(value=None, error=None)
    try:
        code = json.loads(line)
        if code == "join":
            dist.init_process_group("cpu:gloo,npu:npuccl", init_method="file://" + path, rank=rank, world_size=size,
                                    timeout=timedelta(seconds=timeout))
        else:
            scope.pop("value", None)
            exec(code, scope)
            reply["value"] = scope.get("value")
    except BaseException as error:
        reply["error"] = type(error).__name__ + ": " + str(error)
    print(json.dumps(reply), file=replies, flush=True)
"""


@dataclass(frozen=True)
class Reply:
    """What became of the code: what it left in `value`, or its exception in words."""

    value: Any
    error: str | None


class Ranks:
    """`size` ranks of one group, which give up collectives after `timeout` seconds. Killed at the end of the block.

    Further keywords are environment variables of the ranks.
    """

    def __init__(self, size: int, folder: Path, *, timeout: float = 60, join: bool = True, **environment: str) -> None:
        self.log = folder / "ranks.log"
        self._environment = environment
        self._requests: list[IO[str]] = []
        self._answers: list[IO[str]] = []
        arguments = (str(size), str(folder / "store"), str(timeout))
        with self.log.open("w") as log:
            self.processes = [self._start(rank, *arguments, log=log) for rank in range(size)]
        if join:
            self.run("join")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in (*self._requests, *self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def start(self, code: str, ranks: Iterable[int] | None = None) -> None:
        """Send code to some ranks (all by default) without waiting for it."""
        for rank in self._chosen(ranks):
            self._requests[rank].write(json.dumps(code) + "\n")

    def replies(self, ranks: Iterable[int] | None = None) -> list[Reply]:
        """Wait for the replies of some ranks to what was started."""
        return [self._reply(rank) for rank in self._chosen(ranks)]

    def run(self, code: str, ranks: Iterable[int] | None = None) -> list[Any]:
        """Run code that must succeed on some ranks; returns what it left in `value`."""
        self.start(code, ranks)
        replies = self.replies(ranks)
        assert not any(reply.error for reply in replies), replies
        return [reply.value for reply in replies]

    def kill(self, rank: int) -> None:
        """End a rank by SIGKILL."""
        self.processes[rank].kill()
        self.processes[rank].wait()

    def _start(self, rank: int, *arguments: str, log: IO[str]) -> Fork:
        environ = _environ() | {"NPU_SIMULATOR_DEVICES": arguments[0], "NPU_SIMULATOR_MEMORY": "256MiB"}
        environ |= self._environment
        stdin, request = os.pipe()
        answer, stdout = os.pipe()
        self._requests.append(os.fdopen(request, "w", buffering=1))
        self._answers.append(os.fdopen(answer))
        with os.fdopen(stdin) as theirs, os.fdopen(stdout, "w") as ours:
            return _server().start(RANK, str(rank), *arguments, environ=environ, stdin=theirs, stdout=ours, stderr=log)

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        return list(range(len(self.processes)) if ranks is None else ranks)

    def _reply(self, rank: int) -> Reply:
        stream = self._answers[rank]
        ready, _, _ = select.select([stream], [], [], PATIENCE)
        assert ready, f"rank {rank} hangs; log:\n{self.log.read_text()}"
        line = stream.readline()
        assert line, f"rank {rank} is gone; log:\n{self.log.read_text()}"
        return Reply(**json.loads(line))


@cache
def _server() -> ForkServer:
    return ForkServer("torch", "torch.distributed", environ=_environ(), name="ranks")


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NPU_")} | {"OMP_NUM_THREADS": "1"}
