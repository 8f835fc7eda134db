"""A p2p tier over TCP with blocks of 4 KiB, driven as vLLM's scheduler drives it, and one in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from npu_kvconnector.tiers.tcp.manager import TcpTierManager
from npu_kvconnector.tiers.tcp.params import params_for
from tests.support.environments import ROOT
from tests.support.forks import ForkServer
from tests.support.offloading import offloading_config
from tests.support.remote_tier import BLOCK, CHUNKS, block_of, finished_job, job_of, key_of
from tests.support.server import until
from tests.support.stores import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

    from tests.support.forks import Fork

__all__ = ["TcpServer", "secret_in", "stranger"]


def secret_in(folder: Path, text: str = "0123456789abcdef") -> str:
    path = folder / f"secret-{text[:4]}"
    if not path.exists():
        path.write_text(text)
        path.chmod(0o600)
    return str(path)


class TcpServer:
    """What one server does with its tier: a host tier of 64 chunks, and the scheduler's steps."""

    def __init__(self, folder: Path, options: dict[str, Any] | None = None, **config: Any) -> None:
        self.memory = np.zeros((CHUNKS, BLOCK), np.uint8)
        spec = CPUOffloadingSpec(offloading_config(block_bytes=BLOCK, **config))
        place = {"host": "127.0.0.1", "port": free_port(), "peers": ["127.0.0.1"], "secret_file": secret_in(folder)}
        options = {"revision": "r", "deadline": 2.0, **place, **(options or {})}
        self.port = options["port"]
        self.tier = TcpTierManager(spec, memoryview(self.memory), "p2p_tcp", **options)
        self._jobs = 0
        self._requests = 0

    def compute(self, *numbers: int, params: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Do what a prefill request leads to; return the answer's parameters."""
        request = self.begin({"do_remote_decode": True} if params is None else params)
        self.store(request, *numbers)
        answer = self.tier.transfer_params(request)
        self.tier.on_request_finished(request)
        return answer

    def begin(self, params: dict[str, Any] | None) -> ReqContext:
        self._requests += 1
        request = ReqContext(req_id=f"request-{self._requests}", kv_transfer_params=params)
        self.tier.on_new_request(request)
        return request

    def store(self, request: ReqContext, *numbers: int) -> JobResult:
        """Store blocks, which lie in the chunks of their numbers."""
        for number in numbers:
            self.memory[number % CHUNKS] = np.frombuffer(block_of(number), np.uint8)
        self.tier.submit_store(self.job(request, numbers, is_promotion=False))
        return self.finish()

    def load(self, request: ReqContext, *numbers: int) -> tuple[JobResult, list[bytes]]:
        """Load blocks into chunks that hold something else; return what is in them then."""
        for number in numbers:
            self.memory[number % CHUNKS] = 0xEE
        self.tier.submit_load(self.job(request, numbers, is_promotion=True))
        return self.finish(), [self.memory[number % CHUNKS].tobytes() for number in numbers]

    def lookup(self, request: ReqContext, *numbers: int) -> list[bool]:
        """Ask until the peer has answered."""
        until = time.monotonic() + 30
        while True:
            answers = [self.tier.lookup(key_of(number), request) for number in numbers]
            if LookupResult.RETRY not in answers:
                return [answer is LookupResult.HIT for answer in answers]
            assert time.monotonic() < until
            self.step()

    def fetch(self, params: dict[str, Any] | None, *numbers: int) -> tuple[list[bool], list[bytes]]:
        """Do what a decode request leads to: ask, then load what is there; return whether, and the loaded blocks."""
        request = self.begin(params)
        found = self.lookup(request, *numbers)
        there = [number for number, is_there in zip(numbers, found, strict=True) if is_there]
        blocks = self.load(request, *there)[1] if there else []
        self.step(request.req_id)
        self.tier.on_request_finished(request)
        return found, blocks

    def step(self, *scheduled: str) -> None:
        self.tier.on_schedule_end(ScheduleEndContext(new_req_ids=scheduled, preempted_req_ids=()))
        time.sleep(0.005)

    def finish(self) -> JobResult:
        return finished_job(self.tier)

    def job(self, request: ReqContext, numbers: Sequence[int], *, is_promotion: bool) -> TransferJob:
        self._jobs += 1
        return job_of(self._jobs, numbers, request, is_promotion=is_promotion)

    def counts(self) -> dict[str, float]:
        stats = self.tier.get_stats()
        assert stats is not None
        return {name.removeprefix("vllm:npu_kv_p2p_"): sum(of.values()) for name, of in stats._values.items()}


@contextlib.contextmanager
def stranger(folder: Path, count: int) -> Iterator[tuple[Fork, dict[str, Any]]]:
    """Yield a prefill server in a process of its own, which holds so many blocks, and where they are."""
    port, log = free_port(), folder / "stranger.log"
    with log.open("wb") as output:
        arguments = (str(folder), str(port), str(count))
        process = _forks().start(_PROGRAM, *arguments, environ=os.environ, stdout=output, stderr=output)
    try:
        assert until(lambda: "ready" in log.read_text()), log.read_text()
        yield process, params_for("t", "127.0.0.1", port)
    finally:
        process.kill()


_PROGRAM = "import sys; from tests.support.tcp_tier import main; main(*sys.argv[1:])"


@functools.cache
def _forks() -> ForkServer:
    # pytest alone knows where the tests are
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return ForkServer("tests.support.tcp_tier", environ=os.environ | {"PYTHONPATH": path})


def main(folder: str, port: str, count: str) -> None:
    """Hold blocks 0 to COUNT - 1 as the transfer "t" until killed."""
    server = TcpServer(Path(folder), {"port": int(port)})
    server.compute(*range(int(count)), params={"remote_decoder": {"kv_request_id": "t"}})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    time.sleep(600)
