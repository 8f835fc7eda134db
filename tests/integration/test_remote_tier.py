"""Engines that share a store: what one has computed is a hit in the next, with equal tokens, and in no other tenant's."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.stores import S3Server, ValkeyServer
from tests.support.vllm_process import run_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.nightly

PROMPT, NEW, BLOCK = 120, 24, 32
WHOLE_BLOCKS = (PROMPT - 1) // BLOCK * BLOCK
PROMPTS = models.prompt_token_ids([PROMPT] * 4)


@pytest.fixture(params=["s3", "valkey"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Start a store; return the options of a tier over it."""
    if request.param == "valkey":
        valkey = ValkeyServer(tmp_path)
        valkey.start()
        yield {"type": "remote", "url": valkey.url}
        valkey.kill()
        return
    s3 = S3Server(tmp_path)
    s3.start()
    s3.make_bucket("blocks")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "test")
    place = {"endpoint": s3.endpoint, "region": "us-east-1"}
    yield {"type": "remote", "url": "s3://blocks/kv", "refresh": 0.5, "store_options": place}
    s3.kill()


def run_engine(folder: Path, model: Path, tier: dict[str, Any], rounds: list[list[list[int]]]) -> dict[str, Any]:
    """Run an engine of its own process with a tier behind a host tier of 4 MiB; return what came out."""
    folder.mkdir()
    options = {"cpu_bytes_to_use": "4MiB", "offload_prompt_only": False, "secondary_tiers": [tier]}
    scenario = {
        "engine": {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 20,
            "kv_transfer_config": {
                "kv_connector": "NPUOffloadConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": options,
            },
        },
        "rounds": rounds,
        "max_tokens": NEW,
    }
    (folder / "scenario.json").write_text(json.dumps(scenario))
    done = run_module("tests.support.offload_scenario", str(folder / "scenario.json"), str(folder / "result.json"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def secret(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(os.urandom(16).hex())
    path.chmod(0o600)
    return str(path)


def test_prefixes_travel_between_engines_of_a_tenant(store: dict[str, Any], tmp_path: Path) -> None:
    model = models.tiny_qwen3(tmp_path / "model")
    other_weights = models.tiny_qwen3(tmp_path / "other", seed=1)
    ours, theirs = (store | {"secret_file": secret(tmp_path, name)} for name in ("ours", "theirs"))
    rounds = [[prompt] for prompt in PROMPTS]
    first = run_engine(tmp_path / "first", model, ours, rounds)
    assert [answers[0]["cached"] for answers in first["rounds"]] == [0] * 4
    second = run_engine(tmp_path / "second", model, ours, rounds)
    assert [answers[0]["cached"] for answers in second["rounds"]] == [WHOLE_BLOCKS] * 4
    assert [answers[0]["tokens"] for answers in second["rounds"]] == [
        answers[0]["tokens"] for answers in first["rounds"]
    ]
    for name, weights, tier in (("tenant", model, theirs), ("weights", other_weights, ours)):
        stranger = run_engine(tmp_path / name, weights, tier, rounds)
        assert [answers[0]["cached"] for answers in stranger["rounds"]] == [0] * 4
