"""What keeps the platform off gives one clear sentence where vLLM runs, and `npu doctor` explains it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.environments import Environment, add_distribution

if TYPE_CHECKING:
    import subprocess

WORKSPACE = Environment(Path(sys.prefix))
CURRENT_PLATFORM = "from vllm.platforms import current_platform; print('platform', type(current_platform).__name__)"
OTHER_PLATFORM = {
    "entry_points": "[vllm.platform_plugins]\nother = other_platform:register\n",
    "other_platform": "def register():\n    return 'other_platform.OtherPlatform'\n",
}
ALL_PLUGINS = "npu,npu_ops,npu_kvconnector,npu_statlogger"


def problems(environment: Environment = WORKSPACE, **environ: str) -> list[dict[str, str]]:
    """Return the problems that npu doctor finds; its exit code must agree."""
    result = environment.script("npu", "doctor", "--json", check=False, **environ)
    report = json.loads(result.stdout)
    found = [finding for finding in report["findings"] if not finding["ok"]]
    assert report["healthy"] == (not found)
    assert result.returncode == (1 if found else 0)
    return found


def only(found: list[dict[str, str]]) -> dict[str, str]:
    assert len(found) == 1, found
    assert found[0]["remedy"]
    return found[0]


def sentences(result: subprocess.CompletedProcess[str], part: str) -> list[str]:
    return [line for line in (result.stderr + result.stdout).splitlines() if part in line]


def test_a_complete_installation_is_healthy() -> None:
    assert problems() == []


def test_no_vllm(wheels: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "venv")
    environment.install_locked_torch()
    environment.install("npu-platform", "npu-statlogger", wheels=wheels)
    problem = only(problems(environment))
    assert problem["detail"] == "vLLM is not installed, so the npu platform stays off."
    assert "pip install" in problem["remedy"]
    registered = environment.run("import npu_platform; print(npu_platform.register(), npu_platform.register())")
    assert registered.stdout == "None None\n"
    assert len(sentences(registered, "vLLM is not installed")) == 1
    logger = environment.run("import npu_statlogger; npu_statlogger.NPUStatLogger", check=False)
    assert logger.returncode == 1
    assert len(sentences(logger, "vLLM is not installed")) == 1


@pytest.mark.parametrize("version", ["0.31.0", "0.40.0"])
def test_a_vllm_out_of_range(version: str, tmp_path: Path) -> None:
    add_distribution(tmp_path, "vllm", version)
    problem = only(problems(PYTHONPATH=str(tmp_path)))
    assert (
        problem["detail"]
        == f"vLLM {version} is outside the tested range >=0.32.0,<0.33, so the npu platform stays off."
    )
    result = WORKSPACE.run(CURRENT_PLATFORM, PYTHONPATH=str(tmp_path))
    assert "platform NPUPlatform" not in result.stdout
    assert len(sentences(result, f"vLLM {version} is outside the tested range")) == 1


def test_vllm_plugins_that_name_half_of_us() -> None:
    named = "npu,npu_ops"
    problem = only(problems(VLLM_PLUGINS=named))
    assert f"Set VLLM_PLUGINS={ALL_PLUGINS}" in problem["remedy"]
    # vLLM asks the platform for its warnings when it sets up logging.
    asked = "; import vllm.logger; current_platform.log_warnings()"
    result = WORKSPACE.run(CURRENT_PLATFORM + asked, VLLM_PLUGINS=named)
    assert "platform NPUPlatform" in result.stdout
    assert len(sentences(result, f"VLLM_PLUGINS={ALL_PLUGINS}")) == 1


def test_vllm_plugins_without_the_platform_is_explained() -> None:
    problem = only(problems(VLLM_PLUGINS="npu_ops,npu_kvconnector,npu_statlogger"))
    assert "leaves out npu." in problem["detail"]


def test_a_second_platform_plugin(tmp_path: Path) -> None:
    add_distribution(tmp_path, "other-platform", "1.0", **OTHER_PLATFORM)
    # Plugins that import vLLM cannot be loaded either then, so there are more findings; one of them is the cause.
    (problem,) = [problem for problem in problems(PYTHONPATH=str(tmp_path)) if problem["section"] == "platform"]
    assert "other from other-platform" in problem["detail"]
    assert problem["remedy"]
    result = WORKSPACE.run(CURRENT_PLATFORM, check=False, PYTHONPATH=str(tmp_path))
    assert "Only one platform plugin can be activated" in result.stderr.splitlines()[-1]
    # One of the ways out that the doctor names.
    result = WORKSPACE.run(CURRENT_PLATFORM, PYTHONPATH=str(tmp_path), VLLM_PLUGINS=ALL_PLUGINS)
    assert "platform NPUPlatform" in result.stdout


def test_an_instruction_set_that_the_processor_lacks() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    if "avx512f" in flags:
        pytest.skip("this processor has AVX-512; there is no tier that it lacks")
    lacking = "avx512"
    problem = only(problems(NPU_ISA=lacking))
    assert lacking in problem["detail"]
    result = WORKSPACE.run("import npu_ops", check=False, NPU_ISA=lacking)
    assert result.returncode == 1
    assert lacking in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_without_wide_instructions_the_ops_work(isa: str) -> None:
    norm = "torch.ops.npu_ops.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)"
    result = WORKSPACE.run(f"import torch, npu_ops; print({norm}.sum().item())", NPU_ISA=isa)
    assert float(result.stdout) == pytest.approx(16, rel=1e-4)
