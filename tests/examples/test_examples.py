"""vLLM's own examples run unchanged on npu, with small models under the names that they ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

LONGEST = 300
SMALL = ("--kv-cache-memory-bytes", str(1 << 25), "--max-model-len", "512")


@dataclass(frozen=True)
class Example:
    """A script of vLLM's, its arguments, and what its output must hold."""

    script: str
    arguments: tuple[str, ...] = ()
    said: str = ""


OPT = ("--model", "facebook/opt-125m")
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
    Example("rl/pause_resume/pause_resume_offline.py"),
    Example("rl/batch_invariance/reproducibility_offline.py"),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.script)
def test_example(example: Example, examples: Path, hub: Path) -> None:
    settings = {"HF_HUB_OFFLINE": "1", "NPU_SIMULATOR_MEMORY": "2GiB", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(examples / example.script), *example.arguments]
    done = subprocess.run(
        command, cwd=hub, env=os.environ | settings, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "npu" in done.stdout + done.stderr, "another device ran it"
    assert example.said in done.stdout, done.stdout[-2000:]


def test_every_example_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "user_guide" / "examples.md").read_text()
    missing = [example.script for example in EXAMPLES if f"`{example.script}`" not in page]
    assert not missing
