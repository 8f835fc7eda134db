"""Ranks of a process group that tests drive step by step: each is a process that runs the code it is sent."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
    """`size` ranks of one group, which give up collectives after `timeout` seconds. Killed at the end of the block."""

    def __init__(self, size: int, folder: Path, *, timeout: float = 60, join: bool = True) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_")}
        environment |= {"NPU_SIMULATOR_DEVICES": str(size), "NPU_SIMULATOR_MEMORY": "256MiB", "OMP_NUM_THREADS": "1"}
        self.log = folder / "ranks.log"
        with self.log.open("w") as log:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(rank), str(size), str(folder / "store"), str(timeout)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    bufsize=1,
                )
                for rank in range(size)
            ]
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

    def start(self, code: str, ranks: Iterable[int] | None = None) -> None:
        """Send code to some ranks (all by default) without waiting for it."""
        for rank in self._chosen(ranks):
            stream = self.processes[rank].stdin
            assert stream is not None
            stream.write(json.dumps(code) + "\n")

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

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        return list(range(len(self.processes)) if ranks is None else ranks)

    def _reply(self, rank: int) -> Reply:
        stream = self.processes[rank].stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], PATIENCE)
        assert ready, f"rank {rank} hangs; log:\n{self.log.read_text()}"
        line = stream.readline()
        assert line, f"rank {rank} is gone; log:\n{self.log.read_text()}"
        return Reply(**json.loads(line))
