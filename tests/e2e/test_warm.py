"""``npu warm`` fills the cache of Triton kernels; what is served afterwards compiles nothing, and needs no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from npu_platform.demo import MODEL
from npu_platform.demo.command import server_arguments
from npu_platform.demo.server import Server

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton")


def _warm(environ: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "npu_platform.cli", "warm", "--json", "--", str(MODEL), *server_arguments()]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.nightly
def test_what_was_warmed_is_served_without_a_compiler(tmp_path: Path) -> None:
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    first, second = _warm(environ), _warm(environ)
    assert "_get_num_sampled_and_rejected_kernel" in first["compiled"]  # V2's, which nobody had to ask for
    assert 0 < first["compiled_for_requests"] < len(first["compiled"]) == first["in_cache"]
    assert first["refused"] == {}
    assert (second["compiled"], second["in_cache"]) == ([], first["in_cache"])
    without = environ | {"CXX": "no-such-compiler", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    with Server(MODEL, *server_arguments(), log=tmp_path / "log", environment=without) as server:
        server.wait_until_ready(300)
        answer = server.ask("/v1/completions", prompt="1 2 3", max_tokens=4, temperature=0, logprobs=5)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4
    assert "JIT compilation during inference" not in server.log.read_text()
