"""`npu demo`, as a user runs it, and what `npu info` says of its model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from npu_platform import implementations
from npu_platform.demo import MODEL
from npu_platform.demo.server import free_port
from tests.support import models, multimodal
from tests.support.server import until
from tests.support.vllm_process import run_module

if TYPE_CHECKING:
    from collections.abc import Callable


def test_demo_answers_right_and_stops() -> None:
    command = [sys.executable, "-m", "npu_platform.cli", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["right"]
    assert report["stopped_cleanly"]
    assert [answer["right"] for answer in report["answers"]] == [True] * 4
    assert report["answers"][0]["answer"] == "The capital of Iceland is Reykjavik."
    assert report["tokens_per_second"] > 0
    assert report["ran"]["device"].startswith("npu:0")
    assert report["ran"]["dtype"] == "bfloat16"
    assert set(report["ran"]) == {"device", "dtype", "ops", "graphs"}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_a_demo_that_is_ended_ends_its_server(number: signal.Signals, tmp_path: Path) -> None:
    """As by `timeout`, by CI, or by a terminal that is closed; the server is in a session of its own."""
    command = [sys.executable, "-u", "-m", "npu_platform.cli", "demo"]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        port = demo.stdout.readline().partition(" (log")[0].rpartition(":")[2]
        assert until(lambda: len(processes_with(port)) == 1)
        demo.send_signal(number)
        assert demo.wait(40) == 128 + number
    assert not processes_with(port)


def processes_with(argument: str) -> list[int]:
    """Return the processes that were started with an argument."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process.pid] if argument in process.cmdline() else []
    return found


def test_layers_of_the_demo_model() -> None:
    done = run_module("npu_platform.implementations", str(MODEL), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_layers(json.loads(done.stdout.rpartition("npu-layers:")[2].splitlines()[0]))


@pytest.mark.nightly
def test_info_tells_the_layers() -> None:
    command = [sys.executable, "-m", "npu_platform.cli", "info", "--ops", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_layers(json.loads(done.stdout)["layers"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "implementation"),
    [
        (models.tiny_bert, "npu_ops::varlen_attention"),
        (multimodal.tiny_qwen2_5_vl, "npu_ops::paged_attention"),
        (multimodal.tiny_whisper, "npu_ops::paged_attention"),
        (lambda folder: models.tiny_llama(folder, max_position_embeddings=64), "npu_ops::paged_attention"),
    ],
    ids=["encoder", "sees", "hears", "short"],
)
def test_layers_of_other_models(make: Callable[[Path], Path], implementation: str, tmp_path: Path) -> None:
    kinds = implementations.of_checkpoint(str(make(tmp_path / "model")))
    assert any(kind.implementation.startswith(implementation) for kind in kinds)


def test_why_a_model_does_not_load_comes_first(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text()) | {"architectures": ["UnheardOfForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        RuntimeError, match=r"could not be loaded: .*\n.*\['UnheardOfForCausalLM'\] are not supported"
    ) as error:
        implementations.of_checkpoint(str(tmp_path))
    assert len(str(error.value)) < 1200
    with pytest.raises(RuntimeError, match="there is no such folder"):
        implementations.of_checkpoint(str(tmp_path / "nowhere"))


def assert_layers(kinds: list[dict[str, Any]]) -> None:
    layers = {kind["layer"]: kind for kind in kinds}
    assert layers["Attention"]["implementation"].startswith("npu_ops::paged_attention (cache auto)")
    assert layers["NpuRowParallelLinear"]["implementation"].startswith("npu_ops::linear")
    assert layers["NpuRowParallelLinear"]["dtype"] == "bfloat16"
    assert layers["NpuRowParallelLinear"]["count"] == 6


def test_wrong_usage_has_its_own_exit_code() -> None:
    command = [sys.executable, "-m", "npu_platform.cli", "bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'bench'" in done.stderr


def test_a_servers_port_is_none_that_a_connection_may_take() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert free_port() != port
    assert not lowest <= port <= highest or lowest <= 12_000
