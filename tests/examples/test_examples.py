"""vLLM's own examples run unchanged on npu, with small models under the names that they ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LONGEST = 300
SMALL = ("--kv-cache-memory-bytes", str(1 << 25), "--max-model-len", "512")


@dataclass(frozen=True)
class Example:
    """A script of vLLM's, its arguments, and what its output must hold; `before`: another that makes what it reads.

    `below`: the folder of the hub's that it runs in.
    """

    script: str
    arguments: tuple[str, ...] = ()
    said: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    before: Example | None = None
    below: str = ""


OPT = ("--model", "facebook/opt-125m")
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
CONNECTED = "disaggregated/example_connector"
RECOVERED = "disaggregated/kv_load_failure_recovery_offline"
SHARDED = "features/sharded_state"
DRAFTED = ("--method", "ngram", "--model-dir", "facebook/opt-125m", "--max-model-len", "256", "--output-len", "16")
RANDOM = ("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "4")
EXAMPLES = [
    Example("basic/offline_inference/basic.py", said="Generated Outputs"),
    Example("basic/offline_inference/generate.py", SMALL, "Generated text"),
    Example("basic/offline_inference/chat.py", SMALL, "Generated text"),
    Example("basic/offline_inference/embed.py", said="Embeddings"),
    Example("basic/offline_inference/classify.py", said="Class Probabilities"),
    Example("basic/offline_inference/score.py", said="Score"),
    Example("deployment/async_llm_streaming.py", said="streaming examples completed"),
    Example("deployment/llm_engine_example.py", (*OPT, *SMALL), "CompletionOutput"),
    Example("features/automatic_prefix_caching/prefix_caching_offline.py", said="Generated answers are the same: True"),
    Example("features/logits_processor/custom.py", said="Generated Outputs"),
    Example("features/logits_processor/custom_req.py", said="Generated Outputs"),
    Example("features/logits_processor/custom_req_init.py", said="Generated Outputs"),
    Example("features/profiling/run_one_batch_offline.py", SMALL),
    Example("features/prompt_embed/prompt_embed_offline.py", said="Single Inference Output"),
    Example("features/reset_kv/reset_kv_offline.py", (*OPT, *SMALL[:2], "--max-model-len", "2048")),
    Example("features/structured_outputs/structured_outputs_offline.py", said="Structured outputs by"),
    Example("observability/metrics/offline.py", said="vllm:"),
    Example("features/automatic_prefix_caching/automatic_prefix_caching_offline.py", said="Generation time"),
    Example("features/logits_processor/dry.py", said="with DRY", environ=V2),
    Example("features/profiling/simple_profiling_offline.py", said="Generated text"),
    Example("features/speculative_decoding/spec_decode_offline.py", (*DRAFTED, *RANDOM), "mean acceptance length"),
    Example("generate/trace_replay_offline.py", said="Replayed tokens match the requested trace exactly", environ=V2),
    Example(
        f"{SHARDED}/load_sharded_state_offline.py",
        ("--model", "sharded", *SMALL),
        "Generated outputs",
        before=Example(f"{SHARDED}/save_sharded_state_offline.py", (*OPT, *SMALL, "--output", "sharded")),
    ),
    Example(
        "features/data_parallel/data_parallel_offline.py",
        ("-dp=2", "-tp=1", *SMALL, "--enforce-eager"),
        "DP rank 1",
        environ={"NPU_SIMULATOR_DEVICES": "2"},
    ),
    Example(
        f"{CONNECTED}/decode_example.py",
        said="Generated text",
        before=Example(f"{CONNECTED}/prefill_example.py", below="words"),
        below="words",
    ),
    Example(
        f"{RECOVERED}/decode_example.py",
        ("--simulate-failure",),
        "Generated text",
        before=Example(f"{RECOVERED}/prefill_example.py", below="words"),
        below="words",
    ),
    Example("pooling/reward/sequence_reward_offline.py", ("--max-model-len", "512"), "Reward"),
    Example("pooling/token_embed/multi_vector_retrieval_offline.py", said="Score"),
    Example("rl/pause_resume/pause_resume_offline.py"),
    Example("rl/batch_invariance/reproducibility_offline.py"),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.script)
def test_example(example: Example, examples: Path, place: Path) -> None:
    if example.before is not None:
        run(example.before, examples, place)
    said, log = run(example, examples, place)
    assert "npu" in said + log, "another device ran it"
    assert example.said in said, said[-2000:]


def run(example: Example, examples: Path, place: Path) -> tuple[str, str]:
    """Return what it said on both outputs."""
    settings = {"HF_HUB_OFFLINE": "1", "NPU_SIMULATOR_MEMORY": "2GiB", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(examples / example.script), *example.arguments]
    environ = os.environ | settings | example.environ
    done = subprocess.run(
        command, cwd=place / example.below, env=environ, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout, done.stderr


def test_every_example_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "user_guide" / "examples.md").read_text()
    scripts = [one.script for example in EXAMPLES for one in (example, example.before) if one is not None]
    missing = [script for script in scripts if f"`{script}`" not in page]
    assert not missing
