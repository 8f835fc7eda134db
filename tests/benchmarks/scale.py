"""What many ranks cost on the null device: ``nox -s bench -- scale`` writes scale.json and draws scale.md.

Engines of 1 to 64 ranks (TP up to 8, then PP 2, then DP) start as forks of a process that has imported vLLM, answer
requests and stop. A step's parts are timed where they are done (:mod:`tests.benchmarks.scale_parts`); collectives are
from the traces of vLLM's profiler.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers

from tests.benchmarks import machine, pages, scale_draw
from tests.benchmarks.split import ATTENTION
from tests.support.vllm_process import start_module

LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (8, 2, 1), (8, 2, 2), (8, 2, 4)]
"""TP, PP and DP."""
LAYERS = 8
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "gather", "barrier")


def main(arguments: list[str] | None = None) -> None:
    """Run the layouts, keep what was found of each, and draw the page."""
    options = parse(arguments)
    folder = Path(options.results) if options.results else pages.folder()
    part = folder / "scale.json"
    record: dict[str, Any] = {"suite": "scale", "machine": machine.facts(), "runs": []}
    if options.resume and part.exists():
        record["runs"] = json.loads(part.read_text())["runs"]
    done = {scale_draw.ranks(run) for run in record["runs"]}
    with tempfile.TemporaryDirectory() as temporary:
        model = llama(Path(temporary) / "model")
        for layout in LAYOUTS:
            size = layout[0] * layout[1] * layout[2]
            if size > options.ranks or size in done:
                continue
            print(f"{time.strftime('%H:%M:%S')} TP {layout[0]}, PP {layout[1]}, DP {layout[2]}", flush=True)
            number = 10_000 if size == options.ranks else 256 * layout[2]
            place = Path(temporary) / str(size)
            record["runs"].append(measured(model, place, layout, number, options))
            folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(record, indent=1) + "\n")
    scale_draw.main([str(part)])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, default=64, help="most ranks; the engine of so many gets 10,000 requests")
    parser.add_argument("--tokens", type=int, default=32, help="of each request (default 32)")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds of a layout")
    parser.add_argument("--resume", action="store_true", help="keep the layouts of the record that is there")
    parser.add_argument("--results", help="folder for scale.json and scale.md (default: docs/benchmarks/MACHINE)")
    return parser.parse_args(arguments)


def llama(folder: Path) -> Path:
    """Write a configuration whose heads are shared out among eight ranks."""
    shape = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512}
    named = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    transformers.LlamaConfig(**shape, **named).save_pretrained(folder)
    return folder


def measured(
    model: Path, folder: Path, layout: tuple[int, int, int], requests: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one layout; RuntimeError with its last words where it fails."""
    folder.mkdir()
    environ = os.environ | {
        "NPU_DEVICE": "null",
        "NPU_SIMULATOR_DEVICES": str(layout[0] * layout[1]),  # of a host, each of which has one replica
        "NPU_SIMULATOR_MEMORY": "1GiB",
        "NPU_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "NPU_SCALE_FOLDER": str(folder),
    }
    log = folder / "log"
    numbers = (*layout, requests, 4 if requests == 10_000 else options.tokens)
    with log.open("wb") as words:
        arguments = ("tests.benchmarks.scale_run", str(model), str(folder), *map(str, numbers))
        process = start_module(*arguments, environ=environ, output=words)
    if process.wait(options.timeout):
        msg = f"{layout} failed:\n{log.read_text(errors='replace')[-6000:]}"
        raise RuntimeError(msg)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found | {"step": step(folder, found)}


def step(folder: Path, found: dict[str, Any]) -> dict[str, float]:
    """Return medians of a step in milliseconds, by part, and the number of steps of a replica."""
    begin, end = found.pop("window")
    parts: dict[str, list[list[dict[str, float]]]] = {"scheduler": [], "rank": []}
    for file in folder.glob("*-*.json"):
        steps = [one for one in json.loads(file.read_text()) if begin <= one["began"] < end]
        parts[file.name.partition("-")[0]].append(steps)
    result: dict[str, float] = {"number": statistics.median(len(steps) for steps in parts["scheduler"])}
    began = [[one["began"] for one in steps] for steps in parts["scheduler"]]
    result["wall"] = middle([later - one for times in began for one, later in itertools.pairwise(times)])
    for name, lists in parts.items():
        for kind in ("wall", "cpu"):
            result[f"{name} {kind}"] = middle([one[kind] for steps in lists for one in steps])
    return result | {"collectives": collectives(folder / "traces", found["pp"])}


def middle(seconds: list[float]) -> float:
    """Return the median in milliseconds."""
    return round(statistics.median(seconds) * 1e3, 4) if seconds else 0.0


def collectives(traces: Path, pp: int) -> float:
    """Return the milliseconds of collectives in a step, the median of the ranks."""
    found = []
    for trace in traces.rglob("*.json.gz"):
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        steps = sum(event["name"] == ATTENTION for event in kernels) * pp / LAYERS
        if steps:
            every = sum(event["dur"] for event in kernels if any(name in event["name"] for name in COLLECTIVES))
            found.append(every / 1e3 / steps)
    return statistics.median(found) if found else 0.0


if __name__ == "__main__":
    main()
