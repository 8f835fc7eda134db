"""vLLM's own examples of clients run unchanged against `vllm serve` on npu, at the port that they ask."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "http://127.0.0.1:8000"  # which the clients have in their text
READY, LONGEST = 200, 120
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@dataclass(frozen=True)
class Served:
    """A model by its name on the hub, further arguments of ``vllm serve``, and clients with what they must say."""

    model: str
    options: tuple[str, ...]
    clients: dict[str, str]


SERVED = [
    Served(
        "meta-llama/Llama-3.2-1B-Instruct",
        ("--max-model-len", "2048", "--max-num-seqs", "8", "--enable-prompt-embeds", *TOOLS),
        {
            "basic/online_serving/openai_chat_completion_client.py": "ChatCompletion(",
            "basic/online_serving/openai_completion_client.py": "Completion(",
            "features/structured_outputs/structured_outputs_client.py": "Content:",
            "features/prompt_embed/prompt_embed_inference_with_openai_client.py": "Completions API",
            "tool_calling/openai_chat_completion_client_with_tools_required.py": "function=",
        },
    ),
    Served(
        "Qwen/Qwen3-0.6B",
        ("--max-model-len", "512", "--max-num-seqs", "8", "--enable-scale-out"),
        {"scale_out/token_generation_client.py": "Token generation results"},
    ),
    Served(
        "intfloat/e5-small",
        (),
        {
            "pooling/embed/openai_embedding_client.py": "[",
            "pooling/embed/embedding_requests_base64_online.py": "torch.Size([2,",
            "pooling/embed/embedding_requests_bytes_online.py": "torch.Size([2,",
        },
    ),
    Served("BAAI/bge-reranker-base", (), {"pooling/score/rerank_api_online.py": "Request successful!"}),
    Served("BAAI/bge-reranker-v2-m3", (), {"pooling/score/score_api_online.py": "'score':"}),
    Served("jason9693/Qwen2.5-1.5B-apeach", (), {"pooling/classify/classification_online.py": "'probs':"}),
    Served("Skywork/Skywork-Reward-V2-Qwen3-0.6B", (), {"pooling/reward/sequence_reward_online.py": "'data':"}),
    Served(
        "BAAI/bge-m3",
        ("--pooler-config.task", "token_embed"),
        {"pooling/token_embed/multi_vector_retrieval_online.py": "'score':"},
    ),
]


@pytest.mark.usefixtures("port")
@pytest.mark.parametrize("served", SERVED, ids=lambda one: one.model)
def test_clients(served: Served, examples: Path, place: Path) -> None:
    with server(served, place):
        for script, said in served.clients.items():
            command = [sys.executable, str(examples / script)]
            environ = os.environ | {"HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                command, cwd=place, env=environ, capture_output=True, text=True, timeout=LONGEST, check=False
            )
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
            assert said in done.stdout, (script, done.stdout[-2000:])


def test_every_client_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "user_guide" / "examples.md").read_text()
    assert not [script for served in SERVED for script in served.clients if f"`{script}`" not in page]


@contextlib.contextmanager
def server(served: Served, place: Path) -> Iterator[None]:
    """Serve as the clients' texts say, until the block ends."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", served.model, *served.options]
    small = ("--kv-cache-memory-bytes", str(1 << 26))
    settings = {"HF_HUB_OFFLINE": "1", "NPU_SIMULATOR_MEMORY": "2GiB"}
    log = place / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *small], cwd=place, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            wait(process, log)
            assert "npu" in log.read_text(), "another device serves"
            yield
        finally:
            process.terminate()
            process.wait(60)


def wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server is healthy."""
    end = time.monotonic() + READY
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{URL}/health"):
            return
        time.sleep(0.2)
    pytest.fail(f"not healthy after {READY} s: {log.read_text()[-4000:]}")
