"""What npu-kvconnector saves and costs: ``python -m tests.benchmarks.kvconnector [copy] [engine]``.

copy: bytes a second between device and host tier, beside a plain copy of the same bytes on the host. engine: Qwen3-0.6B's
shape with random weights; seconds to the first token of a prompt that is computed, that comes from the host tier, and
that comes from the tier behind it; and seconds for prompts that never come back, without a connector and with each.
Each engine runs in a process of its own, in turns. Any interpreter with vLLM and npu-kvconnector will do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from tests.benchmarks.checkpoint import write_model
from tests.benchmarks.engine_cases import QWEN3_06B
from tests.benchmarks.machine import machine
from tests.benchmarks.results import abba

LAYERS, PAGE, BLOCKS = 28, 65_536, 512  # Qwen3-0.6B: 8,192 tokens in blocks of 16, bfloat16
NEW_PROMPTS, NEW_TOKENS, NEW_ANSWER = 8, 256, 16
REPEATS = 3


def main() -> None:
    """Measure what is asked for, all by default, and print the tables."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.kvconnector", description=__doc__)
    parser.add_argument("parts", nargs="*", help="copy, engine (default: both)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192], help="of prompts, in tokens")
    parser.add_argument("--rounds", type=int, default=2, help="engines of each kind (default 2)")
    parser.add_argument("--tiers", nargs="*", default=["fs", "durable"], help="types of tier behind the host's")
    parser.add_argument("--layers", type=int, default=QWEN3_06B["num_hidden_layers"], help="fewer for a trial")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(run_engine(**json.loads(options.one))))
        return
    parts = options.parts or ["copy", "engine"]
    if not {*parts} <= {"copy", "engine"}:
        parser.error(f"parts are copy and engine, not {' '.join(parts)}")
    print(f"Machine: {machine()}")
    if "copy" in parts:
        print(f"\n### Between device and host tier\n\n{copies()}")
    if "engine" in parts:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # a disk, where /tmp may be memory
            print(f"\n### In an engine\n\n{engines(Path(folder), options)}")


def copies() -> str:
    """Return a table of bytes a second, in whole rows and in blocks that lie anywhere."""
    import numpy as np
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from npu_kvconnector.tiers.host import HostRegion
    from npu_kvconnector.worker import HostTierWorker

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    memory = torch.ones(LAYERS, BLOCKS, PAGE, dtype=torch.int8, device=device)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(layer, PAGE) for layer in memory],
        [[CanonicalKVCacheRef(number, PAGE) for number in range(LAYERS)]],
    )
    row = LAYERS * PAGE
    region = HostRegion(f"bench-{uuid.uuid4()}", num_chunks=BLOCKS, rank=0, kv_bytes_per_chunk=row, cpu_page_size=row)
    worker = HostTierWorker(caches, region, blocks_per_chunk=1)
    one, other = torch.ones(2, BLOCKS * row, dtype=torch.int8).unbind()
    plain = BLOCKS * row / best(lambda: other.copy_(one)) / 1e9
    shuffled = np.random.default_rng(0).permutation(BLOCKS)
    orders = {"in a row": (range(BLOCKS), range(BLOCKS)), "anywhere": (shuffled, shuffled[::-1])}
    rows = [
        f"Device {device}; a copy on the host: {plain:.1f} GB/s",
        "",
        "| blocks | store, GB/s | load, GB/s | of the copy |",
    ]
    rows.append("|---|---|---|---|")
    for name, (blocks, chunks) in orders.items():
        on_device = GPULoadStoreSpec(list(blocks), [BLOCKS], [0])
        on_host = CPULoadStoreSpec(list(chunks))
        rates = [
            BLOCKS * row / best(lambda: finished(worker, submit, *specs)) / 1e9  # noqa: B023
            for submit, specs in (
                (worker.submit_store, (on_device, on_host)),
                (worker.submit_load, (on_host, on_device)),
            )
        ]
        rows.append(f"| {name} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[0] / plain:.0%}, {rates[1] / plain:.0%} |")
    worker.shutdown()
    return "\n".join(rows)


def finished(worker: Any, submit: Any, source: Any, target: Any) -> None:
    """Carry a job out."""
    submit(1, source, target)
    worker.wait({1})
    (ended,) = worker.get_finished()
    assert ended.success


def best(call: Any) -> float:
    """Return the least seconds of several calls, after one to warm up."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def engines(folder: Path, options: argparse.Namespace) -> str:
    """Return a table of a contestant a row: none, host, and host with each tier behind it."""
    write_model(folder / "model", QWEN3_06B | {"num_hidden_layers": options.layers})
    contestants: dict[str, list[dict[str, Any]] | None] = {"none": None, "host": []}
    for tier in options.tiers:
        place = {"root_dir": str(folder / tier)} if tier == "fs" else {"path": str(folder / tier), "bytes": 8 << 30}
        contestants[f"host and {tier}"] = [{"type": tier, **place}]
    results: dict[str, list[dict[str, list[float]]]] = {name: [] for name in contestants}
    for number in range(options.rounds):
        for name in abba(list(contestants), number):
            asked = {
                "model": str(folder / "model"),
                "tiers": contestants[name],
                "lengths": options.lengths,
                "seed": number * len(contestants) + list(contestants).index(name),
            }
            results[name].append(in_a_process(asked))
    cases = list(dict.fromkeys(case for runs in results.values() for run in runs for case in run))
    rows = [f"| seconds | {' | '.join(contestants)} |", "|---" * (len(contestants) + 1) + "|"]
    for case in cases:
        figures = []
        for name in contestants:
            found = [seconds for run in results[name] for seconds in run.get(case, [])]
            figures.append(f"{statistics.median(found):.3f}" if found else "")
        rows.append(f"| {case} | {' | '.join(figures)} |")
    return "\n".join(rows)


def in_a_process(asked: dict[str, Any]) -> dict[str, list[float]]:
    """Run one engine; return the seconds of each case."""
    command = [sys.executable, "-m", "tests.benchmarks.kvconnector", "--one", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        msg = f"an engine failed: {(done.stdout + done.stderr)[-3000:]}"
        raise RuntimeError(msg)
    return json.loads(results[-1].removeprefix("RESULT "))


def run_engine(model: str, tiers: list[dict[str, Any]] | None, lengths: list[int], seed: int) -> dict[str, list[float]]:
    """Measure one engine: new prompts first, then prompts that come back."""
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "NPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "2GiB", "secondary_tiers": tiers or []},
    }
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(lengths) + 64,
        kv_cache_memory_bytes=2 << 30,
        max_num_seqs=8,
        **({} if tiers is None else {"kv_transfer_config": transfer}),
    )
    prompts = itertools.count(1000 * (seed + 1))

    def ask(lengths: list[int], tokens: int, first: int | None = None) -> float:
        import torch

        asked = []
        for length in lengths:
            generator = torch.Generator().manual_seed(next(prompts) if first is None else first)
            asked.append({"prompt_token_ids": torch.randint(3, 2000, (length,), generator=generator).tolist()})
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - began

    ask([NEW_TOKENS] * NEW_PROMPTS, NEW_ANSWER)  # warm
    case = f"{NEW_PROMPTS} new prompts of {NEW_TOKENS} tokens, {NEW_ANSWER} more each"
    found = {case: [ask([NEW_TOKENS] * NEW_PROMPTS, NEW_ANSWER) for _ in range(REPEATS)]}
    for length in lengths:
        first = next(prompts)
        found[f"{length} tokens, computed"] = [ask([length], 1, first)]
        if tiers is None:
            continue
        for name, with_host in (("host", False), *([("the tier behind", True)] if tiers else [])):
            times = []
            for _ in range(REPEATS):
                time.sleep(1.0 if with_host else 0.2)  # what is stored is not in the way
                ask([32], 1)
                llm.reset_prefix_cache(reset_connector=with_host)
                times.append(ask([length], 1, first))
            found[f"{length} tokens, from {name}"] = times
    return found


if __name__ == "__main__":
    main()
