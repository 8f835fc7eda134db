"""Runs for the commands: lines as the logger writes them, of figures drawn from a seed."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npu_statlogger.fold import Batch
from npu_statlogger.lines import RequestLine
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

START = 1_795_376_400.0
PROCESS = "host:4242"


@dataclass
class Load:
    """What each line of a run holds; `change` may alter a batch, given the number of the line and the engine."""

    engines: int = 1
    lines: int = 40
    interval: float = 10.0
    requests: int = 20
    slow: float = 1.0
    seed: int = 0
    start: float = START
    process: str = PROCESS
    model: str = "model"
    change: Callable[[Batch, int, int], None] = field(default=lambda batch, line, engine: None)

    def batch(self, random: np.random.Generator, line: int, engine: int) -> Batch:
        batch, count = Batch(), self.requests
        spreads: Mapping[str, np.ndarray] = {
            "time_to_first_token_seconds": random.lognormal(np.log(0.1 * self.slow), 0.3, count),
            "inter_token_latency_seconds": random.lognormal(np.log(0.02 * self.slow), 0.2, 20 * count),
            "time_per_output_token_seconds": random.lognormal(np.log(0.02 * self.slow), 0.1, count),
            "e2e_request_latency_seconds": random.lognormal(np.log(0.5 * self.slow), 0.3, count),
            "request_queue_time_seconds": random.exponential(0.01, count),
            "num_requests_running": random.integers(5, 9, 50).astype(float),
            "num_requests_waiting": random.integers(0, 3, 50).astype(float),
            "kv_cache_usage_perc": random.uniform(0.3, 0.4, 50),
        }
        for name, values in spreads.items():
            batch.values[name] = values.tolist()
        batch.counters.update(
            {
                "scheduler_steps": 50,
                "generation_tokens": 21 * count,
                "prompt_tokens": 100 * count,
                "prompt_tokens_by_source.local_compute": 40 * count,
                "prefix_cache_queries": 100 * count,
                "prefix_cache_hits": 60 * count,
                "request_success.stop": count - 2,
                "request_success.length": 2,
            }
        )
        self.change(batch, line, engine)
        return batch

    def snapshots(self) -> Iterable[Snapshot]:
        random = np.random.default_rng(self.seed)
        for line in range(self.lines):
            begin = self.start + line * self.interval
            for engine in range(self.engines):
                snapshot = Snapshot(begin, begin + self.interval, {self.process}, {self.model}, {engine})
                snapshot.add(self.batch(random, line, engine), engine)
                yield snapshot


def text_of(lines: Iterable[Snapshot | RequestLine]) -> str:
    return "".join(json.dumps(line.to_dict(), separators=(",", ":")) + "\n" for line in lines)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let programs that the test starts end on SIGINT, which a shell's background jobs (`nohup nox &`) inherit as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a file of a Load's lines."""

    def write(name: str = "run.jsonl", **settings: object) -> Path:
        path = tmp_path / name
        path.write_text(text_of(Load(**settings).snapshots()))
        return path

    return write


@pytest.fixture
def request_line() -> Callable[..., RequestLine]:
    """Return a function that makes the line of a request."""

    def make(arrival: float = START, e2e: float = 1.0, **changes: object) -> RequestLine:
        known: dict[str, object] = {
            "time": arrival + e2e,
            "process": PROCESS,
            "model": "model",
            "engine": 0,
            "request_id": "",
            "arrival": arrival,
            "finish_reason": "length",
            "e2e_seconds": e2e,
            "queue_seconds": 0.01,
            "prefill_seconds": 0.09,
            "decode_seconds": e2e - 0.1,
            "inference_seconds": e2e - 0.01,
            "first_token_seconds": 0.1,
            "time_per_output_token_seconds": 0.02,
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "generation_tokens": 5,
            "max_tokens": 5,
            "preemptions": 0,
            "corrupted": 0,
            "weight": 1.0,
        }
        return RequestLine(**(known | changes))

    return make


@pytest.fixture
def make_load() -> type[Load]:
    """Return the class of a run's settings."""
    return Load


@pytest.fixture
def as_text() -> Callable[[Iterable[Snapshot | RequestLine]], str]:
    """Return the function that gives lines as a file holds them."""
    return text_of


@pytest.fixture
def bench_result() -> Callable[[], dict[str, object]]:
    """Return a function that makes a result with the fields of `vllm bench serve --save-detailed` of vLLM 0.32."""

    def make() -> dict[str, object]:
        first, gap, count = 0.1, 0.02, 40
        latency = first + 9 * gap
        return {
            "date": "20261122-200000",
            "endpoint_type": "openai",
            "backend": "openai",
            "label": None,
            "model_id": "model",
            "tokenizer_id": "model",
            "num_prompts": count + 1,
            "request_rate": 2.0,
            "duration": 20.5,
            "completed": count,
            "failed": 1,
            "total_input_tokens": 32 * count,
            "total_output_tokens": 10 * count,
            "output_throughput": 10 * count / 20.5,
            "input_lens": [32] * (count + 1),
            "output_lens": [10] * count + [0],
            "ttfts": [first] * count + [0.0],
            "itls": [[gap] * 9] * count + [[]],
            "latencies": [latency] * count + [0.0],
            "start_times": [5000 + 0.5 * index for index in range(count + 1)],
            "errors": [""] * count + ["Connection refused"],
            "mean_ttft_ms": 100.0,
            "median_ttft_ms": 100.0,
            "p99_ttft_ms": 100.0,
            "mean_tpot_ms": 20.0,
            "median_tpot_ms": 20.0,
            "p99_tpot_ms": 20.0,
        }

    return make
