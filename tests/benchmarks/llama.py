"""llama.cpp as a contestant: a GGUF file of the same shape with random weights, and its own two benchmarks.

``llama-bench`` times prompts and the steps of one sequence, ``llama-batched-bench`` the steps of several; both warm up first. A
sample of theirs is the mean of the steps of one generation. Its cache of keys and values is float16, its default.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.benchmarks.engine_cases import CHOICES, Case, answer_each

COMPUTED = 8192  # tokens: it has to compute a context, and a longer one takes the better part of an hour on two cores


def main(programs: str, model: str, started: str, cases: str, asked: str = "") -> None:
    """Time every case and print one JSON line, or a line for each that is asked for, as a contestant that is vLLM does."""
    chosen = [case for case in CHOICES[cases] if case.context <= COMPUTED]
    first = begin(Path(programs), Path(model), float(started))

    def measured(case: Case) -> dict[str, Any]:
        seconds = {case.name: measure(Path(programs), Path(model), case, first)}
        return {"seconds": seconds, "memory_gib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20}

    if asked:
        answer_each(chosen, first, measured)
        return
    result: dict[str, Any] = first | {"seconds": {}}
    for case in chosen:
        one = measured(case)
        result |= {"memory_gib": one["memory_gib"], "seconds": result["seconds"] | one["seconds"]}
    print("RESULT " + json.dumps(result), flush=True)


def write_model(path: Path, shape: dict[str, Any]) -> None:
    """Write a Qwen3 of this shape in bfloat16, norms in float32, without a vocabulary."""
    writer = gguf.GGUFWriter(path, "qwen3")
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    random = np.random.default_rng(0)
    add_matrix(writer, random, "token_embd", shape["vocab_size"], hidden)
    add_norm(writer, "output_norm", hidden)
    for layer in range(shape["num_hidden_layers"]):
        block = f"blk.{layer}"
        for name, rows, columns in (
            ("attn_q", heads * size, hidden),
            ("attn_k", kv_heads * size, hidden),
            ("attn_v", kv_heads * size, hidden),
            ("attn_output", hidden, heads * size),
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            add_matrix(writer, random, f"{block}.{name}", rows, columns)
        for name, width in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", size), ("attn_k_norm", size)):
            add_norm(writer, f"{block}.{name}", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_matrix(writer: gguf.GGUFWriter, random: np.random.Generator, name: str, rows: int, columns: int) -> None:
    """Add small random numbers in bfloat16, the upper halves of floats."""
    numbers = (random.standard_normal((rows, columns), dtype=np.float32) * 0.02).view(np.uint32) >> 16
    writer.add_tensor(
        f"{name}.weight", numbers.astype(np.uint16).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
    )


def add_norm(writer: gguf.GGUFWriter, name: str, width: int) -> None:
    """Add ones in float32."""
    writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))


def begin(programs: Path, model: Path, started: float) -> dict[str, Any]:
    """Return the start, what ran, and the list in which it is noted how it is called."""
    result: dict[str, Any] = {"commands": []}
    first = bench(programs, model, ["-p", "16", "-n", "0", "-r", "1", "--no-warmup"], result)
    versions = {"llama.cpp": version(programs), "processor": first[0]["cpu_info"]}
    return result | {"first_token_s": time.time() - started, "versions": versions}


def measure(programs: Path, model: Path, case: Case, result: dict[str, Any]) -> list[float]:
    """Return the seconds of a case's samples."""
    return (prefill if case.kind == "prefill" else decode)(programs, model, case, result)


def prefill(programs: Path, model: Path, case: Case, result: dict[str, Any]) -> list[float]:
    """Return the seconds of each prompt."""
    prompt = ["-p", str(case.context), "-n", "0", "-r", str(case.samples)]
    (row,) = bench(programs, model, prompt, result)
    return [nanoseconds / 1e9 for nanoseconds in row["samples_ns"]]


def decode(programs: Path, model: Path, case: Case, result: dict[str, Any]) -> list[float]:
    """Return the mean seconds of a step, as a single sample."""
    if case.batch == 1:
        depth = ["-p", "0", "-n", str(case.samples), "-d", str(case.context), "-r", "1"]
        (row,) = bench(programs, model, depth, result)
        return [row["avg_ns"] / 1e9 / case.samples]
    room = str(case.batch * (case.context + case.samples))
    sizes = ["-c", room, "-npp", str(case.context), "-ntg", str(case.samples), "-npl", str(case.batch)]
    command = [str(programs / "llama-batched-bench"), "-m", str(model), "-t", threads(), *sizes]
    lines = run([*command, "-b", "2048", "--output-format", "jsonl"], result)
    (row,) = [json.loads(line) for line in lines if line.startswith("{")]
    return [row["t_tg"] / case.samples]


def bench(programs: Path, model: Path, options: list[str], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Run llama-bench and return its rows."""
    command = [str(programs / "llama-bench"), "-m", str(model), "-t", threads(), "-o", "json", *options]
    return json.loads("".join(run(command, result)))


def run(command: list[str], result: dict[str, Any]) -> list[str]:
    """Run a command, note it without its folders, and return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode != 0:
        msg = f"{' '.join(command)} failed (exit code {done.returncode}):\n{done.stderr[-3000:]}"
        raise RuntimeError(msg)
    result["commands"].append(re.sub(r"\S*/", "", " ".join(command)))
    return done.stdout.splitlines()


def threads() -> str:
    """Return how many cores this process may use."""
    return str(len(os.sched_getaffinity(0)))


def version(programs: Path) -> str:
    """Return the version of llama-cpp-python whose llama.cpp this is, as the session that built it noted."""
    note = programs / "VERSION"
    return note.read_text().strip() if note.exists() else "unknown"


if __name__ == "__main__":
    main(*sys.argv[1:])
