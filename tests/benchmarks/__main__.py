"""The engine beside vLLM's CPU backend in one run, interleaved: ``nox -s bench``.

Shape: Qwen3-0.6B with random bf16 weights. Figures are medians over the rounds; the ratio says how many times better
the npu is. ``--json FILE`` keeps the figures of every round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}


def main() -> None:
    """Run the rounds and print the table."""
    options = parse()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_06B))
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds} ...", file=sys.stderr, flush=True)
            rounds.append({"npu": run(sys.executable, folder, {"OMP_WAIT_POLICY": "PASSIVE"})})
            if options.peer_python:
                cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                peer = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}
                rounds[-1]["peer"] = run(options.peer_python, folder, peer)
    print(table(rounds))
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine(), "rounds": rounds}, indent=1))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks", description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM's CPU build (vllm-cpu)")
    parser.add_argument("--rounds", type=int, default=2, help="interleaved rounds (default 2)")
    parser.add_argument("--json", help="file for the figures of every round")
    return parser.parse_args()


def run(python: str, model: str, environ: dict[str, str]) -> dict[str, float]:
    """Run one contestant in a process of its own and return its figures."""
    # as a module: beside a script, kernels.py would be what transformers imports by that name
    case = [python, "-m", "tests.benchmarks.engine_case", model, str(time.time())]
    env = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | environ
    root = Path(__file__).parents[2]
    done = subprocess.run(case, env=env, cwd=root, capture_output=True, text=True, timeout=1800, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    msg = f"{python} gave no result (exit code {done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}"
    raise RuntimeError(msg)


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Return the medians as a Markdown table."""
    lines = [f"Machine: {machine()}", "", "| what | npu | vllm-cpu | ratio |", "|---|---|---|---|"]
    for what in rounds[0]["npu"]:
        ours = statistics.median(one["npu"][what] for one in rounds)
        if "peer" not in rounds[0]:
            lines.append(f"| {what} | {ours:.1f} | - | - |")
            continue
        theirs = statistics.median(one["peer"][what] for one in rounds)
        ratio = ours / theirs if "tok/s" in what else theirs / ours
        lines.append(f"| {what} | {ours:.1f} | {theirs:.1f} | {ratio:.2f} |")
    return "\n".join(lines)


def machine() -> str:
    """Return the processor, its cores that this process may use, and the load before the run."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
