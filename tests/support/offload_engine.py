"""Engines with the connector, each in a process of its own on npu, vLLM's CPU build or CUDA, and their scenarios."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import models
from tests.support.vllm_process import PASSIVE, run_module

__all__ = ["BLOCK", "Case", "environment", "run_scenario", "write_scenario"]

ROOT = Path(__file__).parents[2]
NEW, BLOCK = 64, 32
MADE_BY = "needs an interpreter with vLLM's CPU build in NPU_PEER_PYTHON; `nox -s peer` makes one and runs this"
SCENARIO = "tests.support.offload_scenario"
PATIENT = {**dict.fromkeys(("load_seconds", "lookup_seconds", "store_seconds", "call_seconds"), 60), "pending_share": 1}
"""A guard that leaves nothing out while a busy disk makes a tier wait."""


class Case(NamedTuple):
    """One engine: which model, how many blocks on the device, and what else is asked of it."""

    platform: str = "npu"
    model: str = "qwen3"
    blocks: int = 20
    engine: dict[str, Any] = {}  # noqa: RUF012  # read only
    tier: dict[str, Any] | None = None
    devices: int = 1
    host: str = "4MiB"
    """Of host memory where a tier lies behind it: too little for all prompts, so that some come from that tier."""
    is_sample: bool = False
    """Whether vLLM's CPU build laid over our environment will do, where there is no environment with it."""

    @property
    def tells_events(self) -> bool:
        """Whether its tier tells of what it stores."""
        return bool(self.tier and self.tier.get("enable_kv_events"))

    @property
    def is_trusty(self) -> bool:
        """Whether its tier has all that was stored, whole and in time."""
        return self.tier is None or self.tier["type"] not in {"FlakyTier", "HungDisk"}


def run_scenario(case: Case, folder: Path, rounds: list[Any], **scenario: Any) -> dict[str, Any]:
    """Run rounds in an engine with the connector and return what came out; see :mod:`tests.support.offload_scenario`."""
    files = (str(write_scenario(case, folder, rounds, **scenario)), str(folder / "result.json"))
    if case.platform == "npu":
        done = run_module(SCENARIO, *files, **environment(case))
    else:
        done = (run_on_cuda if case.platform == "cuda" else run_on_peer)(case, folder, *files)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return json.loads((folder / "result.json").read_text())


def write_scenario(case: Case, folder: Path, rounds: list[Any], **scenario: Any) -> Path:
    """Write a scenario; a tier behind the host's makes that one too small for all. ``connector=False``: without both."""
    canonical = {"canonical_layout": True} if scenario.pop("canonical", False) else {}
    options: dict[str, Any] = {"cpu_bytes_to_use": "64MiB", "offload_prompt_only": False, **canonical}
    if case.tier is not None:
        places = {
            "fs": {"root_dir": str(folder / "tier")},
            "durable": {"path": str(folder / "tier"), "bytes": 64 << 20},
            "HungDisk": {"path": str(folder / "tier"), "bytes": 64 << 20},
        }
        tier = places.get(case.tier["type"], {}) | ({"guard": PATIENT} if case.is_trusty else {}) | case.tier
        options |= {"cpu_bytes_to_use": case.host, "secondary_tiers": [tier]}
    sockets = {"endpoint": f"ipc://{folder / 'events'}", "replay_endpoint": f"ipc://{folder / 'replay'}"}
    events = {"enable_kv_cache_events": True, **sockets} if case.tells_events else None
    options["self_describing_kv_events"] = events is not None
    transfer = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    if not scenario.pop("connector", True):
        transfer = None
    makers = {**models.MAKERS, **models.RECURRENT}
    whole = {
        "engine": {
            "model": str(makers[case.model](folder / "model")),
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "block_size": BLOCK,
            "num_gpu_blocks_override": case.blocks,
            "enforce_eager": case.platform != "npu",  # others would compile for a minute
            **case.engine,
            **({"kv_events_config": events} if events else {}),
            "kv_transfer_config": transfer,
        },
        "rounds": rounds,
        "max_tokens": NEW,
        "settle_seconds": 60 if case.is_trusty else 1,  # a silent tier never ends what it has begun
        **scenario,
    }
    (folder / "scenario.json").write_text(json.dumps(whole))
    return folder / "scenario.json"


def environment(case: Case) -> dict[str, str]:
    """Return the variables that an engine on npu runs with."""
    devices = {"NPU_SIMULATOR_DEVICES": str(case.devices), "NPU_SIMULATOR_MEMORY": "2GiB"}
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if case.devices == 1 else devices


def run_on_cuda(case: Case, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the scenario with this interpreter, whether npu-platform, which leaves CUDA alone, is installed or not."""
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "offload_scenario.py"), *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )


def run_on_peer(case: Case, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the scenario with the peer's interpreter, or with ours where that is enough."""
    python, sample = os.environ.get("NPU_PEER_PYTHON"), os.environ.get("NPU_PEER_SAMPLE")
    if python:
        environ = {"PYTHONPATH": str(install_beside(python, folder / "site"))}
    elif sample and case.is_sample:
        # Our platform and our device stay out; the connector is there, entry point and all. One process: two others
        # would import vLLM once more each.
        python, alone = sys.executable, {"VLLM_PLUGINS": "npu_kvconnector", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environ = {"PYTHONPATH": sample, "VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **alone}
    else:
        pytest.skip(MADE_BY)
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.run(
        [python, str(ROOT / "tests" / "support" / "offload_scenario.py"), *arguments],
        env={**os.environ, **PASSIVE, **threads, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )


def install_beside(python: str, place: Path) -> Path:
    """Install the connector, entry point and all, into a folder for that interpreter, and return the folder.

    The peer's environment stays as it is: it is also what we are measured against.
    """
    uv = shutil.which("uv")
    assert uv is not None
    options = ["--no-config", "--quiet", "--no-deps", "--python", python, "--target", str(place)]
    subprocess.run(
        [uv, "pip", "install", *options, str(ROOT / "packages" / "npu-kvconnector")], check=True, timeout=300
    )
    return place
