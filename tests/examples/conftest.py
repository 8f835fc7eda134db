"""Where vLLM's own examples are, and the folder that they run in: models lie there under the names of the hub."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npu_platform.demo import MODEL
from tests.support import models, multimodal

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = ("facebook/opt-125m", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen3-0.6B")
WORDS = ("words/meta-llama/Llama-3.2-1B-Instruct", "lmsys/longchat-13b-16k")
"""Models of which a prompt of a thousand words has a thousand tokens; those below `words` are for a folder of their own."""
SCORERS = ("BAAI/bge-reranker-v2-m3", "BAAI/bge-reranker-base", "Skywork/Skywork-Reward-V2-Qwen3-0.6B")


@pytest.fixture(scope="session")
def examples() -> Path:
    """vLLM's examples: NPU_VLLM_SOURCE names its source, which uv otherwise keeps where it has built vLLM from it."""
    given = os.environ.get("NPU_VLLM_SOURCE")
    if given:
        return Path(given) / "examples"
    version = importlib.metadata.version("vllm").partition("+")[0]
    cache = subprocess.run(["uv", "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    found = sorted(Path(cache).glob(f"sdists-v*/pypi/vllm/{version}/*/src/examples"))
    if not found:
        pytest.fail(f"uv's cache has no source of vLLM {version}: unpack its sdist and name it in NPU_VLLM_SOURCE")
    return found[-1]


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the hub to programs that run in it: small models under the names that they ask for."""
    folder = tmp_path_factory.mktemp("hub")
    for name in TEXT:
        shutil.copytree(MODEL, folder / name)
    for name in WORDS:
        models.tiny_llama(folder / name, num_hidden_layers=2)
        multimodal.word_tokenizer({}).save_pretrained(folder / name)
    for name in ("intfloat/e5-small", "BAAI/bge-m3"):
        models.tiny_bert(folder / name)
    models.tiny_classifier(folder / "jason9693/Qwen2.5-1.5B-apeach", labels=2)
    for name in SCORERS:
        models.tiny_classifier(folder / name, labels=1)
    models.with_tokenizer(models.tiny_qwen3_moe(folder / "ibm-research/PowerMoE-3b"))
    return folder


@pytest.fixture
def place(hub: Path, tmp_path: Path) -> Path:
    """A folder of a test's own that looks like the hub, too."""
    for names in hub.iterdir():
        (tmp_path / names.name).symlink_to(names)
    return tmp_path


@pytest.fixture
def port() -> Iterator[None]:
    """Keep the other worker from the port that servers take where none is named, as in vLLM's clients and sweeps."""
    with (Path(tempfile.gettempdir()) / "npu-examples-8000.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
