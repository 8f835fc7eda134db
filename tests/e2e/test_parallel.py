"""Replicas, pipeline stages and `--device-ids`: each rank has the device that is its own, and says what one would say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from npu_platform.demo.facts import sum_of
from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.replicas_run import run_replicas
from tests.support.server import metric, serve_demo
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

    from npu_platform.demo.server import Server

NEW = 10
LENGTHS = [300, 1, 2, 17, 40, 129, 5, 200]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
}
TWO_DEVICES = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB"}


def check(model: Path, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW
        assert_greedy(load(model), prompt, output)


@pytest.mark.parametrize(
    ("name", "offline"),
    [
        pytest.param("llama", False, id="dense-served"),
        pytest.param("qwen3_moe", True, id="experts-offline", marks=pytest.mark.nightly),
    ],
)
def test_replicas(name: str, offline: bool, tmp_path: Path) -> None:
    make = models.MAKERS.get(name) or models.MIXTURES[name]
    model, prompts = make(tmp_path / "model"), models.prompt_token_ids(LENGTHS)
    run = run_replicas(tmp_path, model, prompts, offline=offline, new=NEW, **ENGINE)
    assert run.devices() == {"npu:0", "npu:1"}
    check(model, prompts, run.tokens)


@pytest.mark.nightly
def test_served_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm serve --data-parallel-size 2`: both replicas answer, each from its own device."""
    monkeypatch.setenv("NPU_SIMULATOR_DEVICES", "2")
    facts = [sum_of(a, 12 - a) for a in range(8)]
    with serve_demo(tmp_path, "--data-parallel-size", "2") as server:
        answers = [[ask(server, fact.question, replica) for fact in facts] for replica in (0, 1)]
        generated = [metric(server, "vllm:generation_tokens_total", engine=str(replica)) for replica in (0, 1)]
    assert answers[0] == answers[1]
    assert sum(answer == fact.answer for answer, fact in zip(answers[0], facts, strict=True)) >= len(facts) - 1
    assert generated[0] == generated[1] > len(facts)
    devices = re.findall(r"npu worker: device=(npu:\d)", (tmp_path / "server.log").read_text())
    assert sorted(devices) == ["npu:0", "npu:1"]


def ask(server: Server, question: str, replica: int) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
    url, which = f"{server.url}/v1/chat/completions", {"X-data-parallel-rank": str(replica)}
    answer = httpx.post(url, json=body, headers=which, timeout=120, trust_env=False)
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("gemma3", {"tensor_parallel_size": 2}, id="gemma3-of-two-ranks", marks=pytest.mark.nightly),
        pytest.param("deepseek_v2", {"enforce_eager": True}, id="latent-eager", marks=pytest.mark.nightly),
    ],
)
def test_pipeline_of_two_stages(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model, prompts = models.MAKERS[name](tmp_path / "model"), models.prompt_token_ids(LENGTHS)
    rounds = [{"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": NEW}}]
    devices = 2 * settings.get("tensor_parallel_size", 1)
    environ = TWO_DEVICES | {"NPU_SIMULATOR_DEVICES": str(devices), "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    run = run_engine(tmp_path, model, rounds, environ, **ENGINE | {"pipeline_parallel_size": 2} | settings)
    assert set(re.findall(r"npu worker: device=(npu:\d)", run.log)) == {f"npu:{rank}" for rank in range(devices)}
    check(model, prompts, run.tokens(0))


def test_device_ids(tmp_path: Path) -> None:
    model, prompts = models.tiny_llama(tmp_path / "model"), models.prompt_token_ids(LENGTHS)
    rounds = [{"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": NEW}}]
    run = run_engine(tmp_path, model, rounds, TWO_DEVICES, **ENGINE, device_ids=[1])
    assert re.findall(r"npu worker: device=(npu:\d)", run.log) == ["npu:1"]
    check(model, prompts, run.tokens(0))
