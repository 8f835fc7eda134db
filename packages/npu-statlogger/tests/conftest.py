"""Real vLLM records for the tests, and a vLLM that needs no device; tests of files and sketches do without vLLM."""

from __future__ import annotations

import gzip
import http.server
import os
import threading

# vLLM infers a device as soon as it is imported; these tests run in an environment without a platform plugin.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file that a test's lines go to."""
    return tmp_path / "stats.jsonl"


@pytest.fixture
def iteration_stats() -> IterationStats:
    """One step: a first token, two more tokens, one request finished by length after a preemption."""
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import IterationStats, PrefillStats, RequestStateStats

    stats = IterationStats()
    stats.num_generation_tokens = 3
    prefill = PrefillStats()
    prefill.set(num_prompt_tokens=100, num_local_cached_tokens=60, num_external_cached_tokens=10)
    stats.prompt_token_stats.update_from_output(prefill)
    stats.num_preempted_reqs = 1
    stats.time_to_first_tokens_iter = [0.5]
    stats.inter_token_latencies_iter = [0.02, 0.04]
    request = RequestStateStats(
        num_generation_tokens=11,
        arrival_time=stats.iteration_timestamp - 4.0,
        queued_ts=10.0,
        scheduled_ts=11.0,
        first_token_ts=11.5,
        last_token_ts=13.5,
    )
    stats.update_from_finished_request(FinishReason.LENGTH, "request-1", 100, 11, request, num_cached_tokens=70)
    return stats


@pytest.fixture
def scheduler_stats() -> SchedulerStats:
    """One step: 3 requests run, 2 wait for capacity and 4 for their KV to be loaded; a quarter of the cache in use."""
    from vllm.v1.metrics.stats import SchedulerStats

    stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=4, kv_cache_usage=0.25)
    stats.prefix_cache_stats.record(num_tokens=100, num_hits=60, preempted=False)
    return stats


class Received(http.server.BaseHTTPRequestHandler):
    """Keeps the bodies of requests."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        packed = self.headers.get("Content-Encoding") == "gzip"
        self.server.bodies.append((self.path, gzip.decompress(body) if packed else body))  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()

    do_PUT = do_POST  # noqa: N815 # the name is that of the method of HTTP

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Received) as server:
        server.bodies, server.status = [], 200  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
