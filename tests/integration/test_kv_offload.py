"""The host tier in a real engine: evicted prompts come back from host memory with equal tokens, on npu and elsewhere.

One engine run for each platform and model goes through: eight prompts one by one, more than the device's cache holds;
the first ones again; two given up while they load; the same two once more; four at a time, which preempt each other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import models
from tests.support.vllm_process import run_module, run_program

ROOT = Path(__file__).parents[2]
PROMPT, NEW, BLOCK = 120, 64, 32
MADE_BY = "needs an interpreter with vLLM's CPU build in NPU_PEER_PYTHON; `nox -s peer` makes one and runs this"
COUNT = """
import json, sys, torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from npu_kvconnector.worker import HostTierWorker
def pinned():
    return torch.npu.host_memory_stats()["allocated_bytes.current"]
layers, page, budget = 7, 65536, int(sys.argv[1])
tensors = [CanonicalKVCacheTensor(torch.zeros(4, page, dtype=torch.int8, device="npu"), page) for _ in range(layers)]
refs = [[CanonicalKVCacheRef(layer, page) for layer in range(layers)]]
before = pinned()
worker = HostTierWorker(CanonicalKVCaches(tensors=tensors, group_data_refs=refs), num_chunks=budget // (layers * page),
                        blocks_per_chunk=1, budget=budget)
taken = pinned() - before
worker.shutdown()
print(json.dumps([taken, pinned() - before]))
"""


@pytest.mark.parametrize("budget", [64 << 20, 40 << 20])
def test_the_tier_s_pinned_memory_is_within_its_bytes_and_goes_back_to_the_system(budget: int) -> None:
    done = run_program(COUNT, str(budget))
    assert done.returncode == 0, done.stderr
    taken, left = json.loads(done.stdout.splitlines()[-1])
    assert taken <= budget
    # 40 MiB have no room for themselves rounded up to a power of two, as allocators of pinned memory may do.
    assert (taken > 0) == (budget == 64 << 20)
    assert left == 0


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("npu", "qwen3", 20), id="npu-qwen3"),
        pytest.param(("npu", "gemma3", 60), id="npu-gemma3-hybrid", marks=pytest.mark.nightly),
        pytest.param(("cpu", "qwen3", 20), id="cpu-qwen3", marks=pytest.mark.peer),
        pytest.param(("cpu", "gemma3", 60), id="cpu-gemma3-hybrid", marks=pytest.mark.peer),
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the scenario in an engine of its own; return what it wrote, and what was asked."""
    platform, model, blocks = request.param
    folder = tmp_path_factory.mktemp(f"{platform}-{model}")
    prompts = models.prompt_token_ids([PROMPT] * 8)
    rounds = [[prompt] for prompt in (*prompts, prompts[0], prompts[1])]
    scenario = {
        "engine": {
            "model": str(models.MAKERS[model](folder / "model")),
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "block_size": BLOCK,
            "num_gpu_blocks_override": blocks,
            "enforce_eager": platform == "cpu",  # the peer would compile for a minute
            "kv_transfer_config": {
                "kv_connector": "NPUOffloadConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB", "offload_prompt_only": False},
            },
        },
        "rounds": [*rounds, prompts[2:4], prompts[2:4], prompts[:4]],
        "abort": [len(rounds)],
        "max_tokens": NEW,
    }
    (folder / "scenario.json").write_text(json.dumps(scenario))
    files = (str(folder / "scenario.json"), str(folder / "result.json"))
    done = run_module("tests.support.offload_scenario", *files) if platform == "npu" else run_on_peer(folder, *files)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return {"asked": request.param, **json.loads((folder / "result.json").read_text())}


def run_on_peer(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the scenario with the peer's interpreter, this package beside it, entry point and all."""
    python = os.environ.get("NPU_PEER_PYTHON")
    if not python:
        pytest.skip(MADE_BY)
    uv = shutil.which("uv")
    assert uv is not None
    # A folder on the path instead of an installation: the peer's environment is also what we are measured against.
    place = ["--no-config", "--quiet", "--no-deps", "--python", python, "--target", str(folder / "site")]
    subprocess.run([uv, "pip", "install", *place, str(ROOT / "packages" / "npu-kvconnector")], check=True, timeout=300)
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.run(
        [python, str(ROOT / "tests" / "support" / "offload_scenario.py"), *arguments],
        env={**os.environ, **threads, "PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )


def tokens(run: dict[str, Any], number: int) -> list[list[int]]:
    return [answer["tokens"] for answer in run["rounds"][number]]


def test_it_ran_on_the_platform_asked_for(run: dict[str, Any]) -> None:
    assert run["platform"] == run["asked"][0]
    assert len({tuple(tokens(run, number)[0]) for number in range(8)}) == 8
    assert [run["rounds"][number][0]["cached"] for number in range(8)] == [0] * 8


def test_prompts_come_back_from_the_host_with_equal_tokens(run: dict[str, Any]) -> None:
    whole_blocks = (PROMPT - 1) // BLOCK * BLOCK
    for number in (0, 1):
        assert run["rounds"][8 + number][0]["cached"] == whole_blocks
        assert tokens(run, 8 + number) == tokens(run, number)


def test_hits_and_bytes_are_counted(run: dict[str, Any]) -> None:
    metrics = run["metrics"]
    assert metrics["vllm:external_prefix_cache_hits"] >= 2 * ((PROMPT - 1) // BLOCK) * BLOCK
    assert metrics["vllm:kv_offload_load_bytes"] > 0
    assert metrics["vllm:kv_offload_store_bytes"] > 0


def test_requests_given_up_while_loading_leave_no_trace(run: dict[str, Any]) -> None:
    assert tokens(run, 11) == tokens(run, 2) + tokens(run, 3)


def test_preempted_requests_give_equal_tokens(run: dict[str, Any]) -> None:
    assert tokens(run, 12) == [tokens(run, number)[0] for number in range(4)]
    if run["asked"][1] == "qwen3":  # what hybrid groups take depends on the window
        assert run["metrics"]["vllm:num_preemptions"] > 0
