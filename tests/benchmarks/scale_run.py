"""One engine of many ranks on the null device: starts, answers, stops, and says what that took.

python -m tests.benchmarks.scale_run MODEL FOLDER TP PP DP REQUESTS TOKENS, in a process that has imported vLLM. Each
replica is on a host of its own, as vLLM sees it: the first starts the server's side, the others are ``--headless``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil

AT_A_TIME = 256  # requests of a replica
PROMPT = 16
PATIENCE = 60  # seconds for the end of all processes
TRACED = 8  # tokens of each request while vLLM's profiler looks


def main(model: str, folder: str, *numbers: str) -> None:
    """Write what was found as ``result.json``."""
    from vllm.utils.network_utils import get_open_port

    tp, pp, dp, requests, tokens = map(int, numbers)
    settings = arguments(model, Path(folder), tp, pp)
    hosts = []
    if dp > 1:
        settings |= {"data_parallel_size": dp, "data_parallel_size_local": 1, "data_parallel_address": "127.0.0.1"}
        settings |= {"data_parallel_rpc_port": get_open_port()}
        fork = multiprocessing.get_context("fork")
        hosts = [fork.Process(target=another_host, args=(settings, replica)) for replica in range(1, dp)]
    for host in hosts:
        host.start()
    found = asyncio.run(run(settings, hosts, requests, tokens))
    (Path(folder) / "result.json").write_text(json.dumps(found | {"tp": tp, "pp": pp, "dp": dp}))


def another_host(settings: dict[str, Any], replica: int) -> None:
    """Serve one replica, as ``vllm serve --headless`` on a host of its own."""
    from vllm.entrypoints.cli.main import main as vllm

    words = ["vllm", "serve", settings["model"], "--headless", "--data-parallel-start-rank", str(replica)]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif name != "model":
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            words += [f"--{flag}", *map(str, values)]
    sys.argv[:] = words
    vllm()


async def run(settings: dict[str, Any], hosts: list[Any], requests: int, tokens: int) -> dict[str, Any]:
    """Return seconds of each part and memory (MiB); times of steps are in files of the folder."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    found: dict[str, Any] = {"requests": requests, "tokens": tokens}
    begin = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
    found["start_s"] = time.perf_counter() - begin
    try:
        found["memory_mib"] = memory()
        begin = time.perf_counter()
        await ask(engine, requests, tokens)
        found["answer_s"], found["window"] = time.perf_counter() - begin, (begin, time.perf_counter())
        found["memory_after_mib"] = memory()
        await engine.reset_prefix_cache()  # both write their times
        await engine.collective_rpc("write_times")
        await engine.start_profile()
        await ask(engine, min(requests, AT_A_TIME * (1 + len(hosts))), TRACED)
        await engine.stop_profile()
    finally:
        begin = time.perf_counter()
        engine.shutdown()
        for host in hosts:
            host.terminate()
        found["left"] = left(begin + PATIENCE)
        found["stop_s"] = time.perf_counter() - begin
    return found


def arguments(model: str, folder: Path, tp: int, pp: int) -> dict[str, Any]:
    """Return the engine's settings."""
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "max_model_len": 256,
        "max_num_seqs": AT_A_TIME,
        "max_num_batched_tokens": AT_A_TIME * PROMPT,
        "kv_cache_memory_bytes": 256 << 20,
        "cudagraph_capture_sizes": [AT_A_TIME],
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "scheduler_cls": "tests.benchmarks.scale_parts.TimedScheduler",
        "worker_cls": "tests.benchmarks.scale_parts.TimedWorker",
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(folder / "traces"),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        },
        "disable_log_stats": True,
        "shutdown_timeout": PATIENCE,
    }


async def ask(engine: Any, requests: int, tokens: int) -> None:
    """Send all requests at once and wait for the last token of the last; RuntimeError where one has not all."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def one(number: int) -> int:
        prompt = {"prompt_token_ids": [3 + (number + place) % 500 for place in range(PROMPT)]}
        async for output in engine.generate(prompt, sampling, f"{tokens}-{number}"):
            last = output
        return len(last.outputs[0].token_ids)

    came = await asyncio.gather(*(one(number) for number in range(requests)))
    if set(came) != {tokens}:
        msg = f"{sum(number != tokens for number in came)} of {requests} requests have not their {tokens} tokens."
        raise RuntimeError(msg)


def left(deadline: float) -> int:
    """Return how many processes of the engine are still there at the deadline, or when all are gone."""
    while True:
        children = psutil.Process().children(recursive=True)
        processes = [child for child in children if words(child) and "resource_tracker" not in words(child)]
        if not processes or time.perf_counter() > deadline:
            return len(processes)
        time.sleep(0.05)


def words(process: psutil.Process) -> str:
    """Return its command line; that of one that has ended is empty."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def memory() -> dict[str, float]:
    """Return the share of the host's memory (PSS) of all processes, and the median of what a rank has for itself."""
    pss, own = 0, []
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            sizes = {line.split()[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
            pss += sizes["Pss:"]
            if "Worker" in words(process):
                own.append(sizes["Private_Dirty:"] + sizes["Private_Clean:"])
    return {"all": pss / 1024, "rank": statistics.median(own or [0]) / 1024, "ranks": len(own)}


if __name__ == "__main__":
    main(*sys.argv[1:])
