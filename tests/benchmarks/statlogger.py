"""What npu-statlogger costs: ``python -m tests.benchmarks.statlogger [calls] [folding] [engine]``.

calls: the time of `record()` by number of running requests, beside a logger that is off. folding: the CPU time of our
threads at 50 steps a second with 256 running requests. engine: time between tokens in a real engine without the logger,
with it, and with sinks that all fail, in interleaved rounds of one engine. Any interpreter with vLLM and npu-statlogger
will do, so that vLLM's CPU build is measured by the same program.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import IterationStats, RequestStateStats, SchedulerStats

from npu_statlogger import NPUStatLogger
from tests.benchmarks.machine import machine
from tests.benchmarks.results import abba
from tests.support.models import tiny_llama

PARTS = ("calls", "folding", "engine")
RUNNING = (1, 16, 64, 256)
STEPS_PER_SECOND = 50
CLIENTS, TOKENS = 8, 64
FAILING = {"otlp": "http://127.0.0.1:9", "statsd": "127.0.0.1:9", "push": "http://127.0.0.1:9"}


def main() -> None:
    """Measure what is asked for, all by default, and print the tables."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.statlogger", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds of the engine (default 20)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of folding (default 30)")
    options = parser.parse_args()
    options.parts = options.parts or PARTS
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    print(f"Machine: {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        if "calls" in options.parts:
            print(f"\n### record()\n\n{calls(Path(folder))}")
        if "folding" in options.parts:
            print(f"\n### Folding\n\n{folding(Path(folder), options.seconds)}")
        if "engine" in options.parts:
            print(f"\n### Time between tokens\n\n{asyncio.run(engine(Path(folder), options.rounds))}")


def logger(**settings: object) -> NPUStatLogger:
    """Return a logger as vLLM makes it; without settings it is off."""
    return NPUStatLogger(VllmConfig(additional_config={"npu_statlogger": settings} if settings else {}), [0])


def records(running: int) -> tuple[SchedulerStats, IterationStats]:
    """Return what vLLM records of one step that gave each running request a token and ended one in 128."""
    iteration = IterationStats()
    iteration.num_generation_tokens = running
    iteration.inter_token_latencies_iter = [random.lognormvariate(-4, 0.3) for _ in range(running)]
    for number in range(max(1, running // 128)):
        iteration.time_to_first_tokens_iter.append(random.lognormvariate(-2, 0.3))
        request = RequestStateStats(num_generation_tokens=100, queued_ts=1.0, scheduled_ts=1.1, first_token_ts=1.2)
        iteration.update_from_finished_request(FinishReason.LENGTH, f"request-{number}", 128, 100, request)
    return SchedulerStats(num_running_reqs=running, kv_cache_usage=0.5), iteration


def calls(folder: Path, steps: int = 20_000) -> str:
    """Return a table of the times of record(), on and off in turns: in a loop, and of the first call after a pause."""
    heads = [f"{name}, us: {column}" for name in ("off", "on") for column in ("median", "P99", "after a pause")]
    rows = [f"| running requests | {' | '.join(heads)} |", "|---" * 7 + "|"]
    for running in RUNNING:
        contestants = {"off": logger(), "on": logger(path=str(folder / f"calls-{running}.jsonl"))}
        times: dict[str, list[list[int]]] = {name: [] for name in contestants}
        made = [records(running) for _ in range(100)]
        for number in range(steps // 100):
            for name in abba(list(contestants), number):
                time.sleep(0.01)  # as between steps; the queue stays short
                times[name].append([timed(contestants[name], *stats) for stats in made])
        for each in contestants.values():
            each.close()
        figures = []
        for name in ("off", "on"):
            loop = [call for turn in times[name] for call in turn[1:]]
            figures += [median(loop), quantile(loop, 0.99), median([turn[0] for turn in times[name]])]
        rows.append(f"| {running} | {' | '.join(f'{figure / 1e3:.2f}' for figure in figures)} |")
    return "\n".join(rows)


def timed(contestant: NPUStatLogger, scheduler: SchedulerStats, iteration: IterationStats) -> int:
    """Return how long a call takes, in nanoseconds."""
    begin = time.perf_counter_ns()
    contestant.record(scheduler, iteration)
    return time.perf_counter_ns() - begin


def folding(folder: Path, seconds: float) -> str:
    """Return the share of a core that our threads take, with 256 running requests."""
    on = logger(path=str(folder / "folding.jsonl"))
    made = [records(256) for _ in range(50)]
    begin, cpu = time.monotonic(), thread_seconds()
    for number in range(int(seconds * STEPS_PER_SECOND)):
        on.record(*made[number % len(made)])
        time.sleep(max(0.0, begin + (number + 1) / STEPS_PER_SECOND - time.monotonic()))
    spent, wall = thread_seconds() - cpu, time.monotonic() - begin
    on.close()
    return f"{spent / wall:.3%} of a core at {STEPS_PER_SECOND} steps a second ({spent:.3f} s of {wall:.1f} s)"


def thread_seconds() -> float:
    """Return the CPU time of all threads of ours so far."""
    ours = [each for each in threading.enumerate() if each.name.startswith("npu-statlogger")]
    times = [Path(f"/proc/self/task/{each.native_id}/schedstat").read_text().split()[0] for each in ours]
    return sum(map(int, times)) / 1e9


async def engine(folder: Path, rounds: int) -> str:
    """Return a table of the time between tokens of one engine, the logger exchanged between rounds."""
    model = tiny_llama(folder / "model", hidden_size=256, intermediate_size=1024)
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(model), skip_tokenizer_init=True, max_model_len=256, kv_cache_memory_bytes=64 << 20)
    )
    assert llm.logger_manager is not None
    loggers = llm.logger_manager.stat_loggers
    contestants = {
        "without": None,
        "with": logger(path=str(folder / "engine.jsonl"), interval=1.0, requests=1.0, steps=1.0),
        "every sink fails": failing(folder),
    }
    gaps: dict[str, list[float]] = {name: [] for name in contestants}
    try:
        await turn(llm)  # warm
        for number in range(rounds):
            for name in abba(list(contestants), number):
                added = [contestants[name]] if contestants[name] is not None else []
                loggers.extend(added)
                gaps[name].append(await turn(llm))
                for each in added:
                    loggers.remove(each)
    finally:
        llm.shutdown()
    rows = [
        "| | time between tokens, median of rounds, ms | 2.5 % of rounds below | 2.5 % above |",
        "|---|---|---|---|",
    ]
    for name, values in gaps.items():
        rows.append(
            f"| {name} | {median(values) * 1e3:.3f} | {quantile(values, 0.025) * 1e3:.3f} | {quantile(values, 0.975) * 1e3:.3f} |"
        )
    for name in list(gaps)[1:]:
        low, high = difference(gaps["without"], gaps[name])
        rows.append(
            f"\n{name} minus without: {low * 1e3:+.3f} to {high * 1e3:+.3f} ms (95 % interval of the medians' difference)"
        )
    return "\n".join(rows)


def failing(folder: Path) -> NPUStatLogger:
    """Return a logger none of whose sinks can take anything: files whose directory is gone, servers that are not there."""
    gone = folder / "gone"
    gone.mkdir()
    files = {name: str(gone / name) for name in ("path", "csv", "parquet")}
    made = logger(interval=1.0, requests=1.0, steps=1.0, **files, **FAILING)
    shutil.rmtree(gone)
    return made


async def turn(llm: AsyncLLM) -> float:
    """Let clients stream at the same time and return the median time between two tokens, in seconds."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    async def client(number: int) -> list[float]:
        answers = llm.generate(
            {"prompt_token_ids": list(range(3, 35 + number))}, sampling, f"{number}-{time.monotonic_ns()}"
        )
        times = [time.perf_counter() async for _ in answers]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    gaps = await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return median([gap for each in gaps for gap in each])


def difference(one: list[float], other: list[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the difference of the medians, by resampling rounds."""
    pairs = list(zip(one, other, strict=True))
    found = []
    for _ in range(draws):
        drawn = random.choices(pairs, k=len(pairs))
        found.append(median([b for _, b in drawn]) - median([a for a, _ in drawn]))
    return quantile(found, 0.025), quantile(found, 0.975)


def median(values: list[Any]) -> float:
    return statistics.median(values)


def quantile(values: list[Any], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


if __name__ == "__main__":
    main()
