"""What keeps the platform off gives one clear sentence where vLLM runs, and `npu doctor` explains it.

What the doctor alone says of one wrong variable or plugin is for packages/npu-platform/tests/test_doctor.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import npu_ops
from npu_platform.activation import VLLM_RECIPE
from tests.support.environments import ROOT, Environment, add_distribution
from tests.support.forks import ForkServer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

WORKSPACE = Environment(Path(sys.prefix))
CURRENT_PLATFORM = "from vllm.platforms import current_platform; print('platform', type(current_platform).__name__)"
OTHER_PLATFORM = {
    "entry_points": "[vllm.platform_plugins]\nother = other_platform:register\n",
    "other_platform": "def register():\n    return 'other_platform.OtherPlatform'\n",
}
ALL_PLUGINS = "npu,npu_ops,npu_kvconnector,npu_statlogger"


@pytest.fixture(scope="module")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a program where torch is imported, and vLLM up to its choice of a platform."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NPU_", "VLLM_", "PYTHONPATH"))}
    server = ForkServer("vllm.platforms", environ=clean)

    def in_a_fork(program: str, site: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        installed = f"import sys; sys.path.insert(0, {str(site)!r})\n" if site else ""
        return server.run(installed + program, environ=clean | environ)

    return in_a_fork


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


def test_no_vllm(wheels: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "venv")
    environment.install_locked_torch()
    environment.install("npu-platform", "npu-statlogger", wheels=wheels)
    problem = only(problems(environment))
    assert problem["detail"] == "vLLM is not installed, so the npu platform stays off."
    assert VLLM_RECIPE in problem["remedy"]
    registered = environment.run("import npu_platform; print(npu_platform.register(), npu_platform.register())")
    assert registered.stdout == "None None\n"
    assert len(sentences(registered, "vLLM is not installed")) == 1
    logger = environment.run("import npu_statlogger; npu_statlogger.NPUStatLogger", check=False)
    assert logger.returncode == 1
    assert len(sentences(logger, "vLLM is not installed")) == 1


def test_the_recipe_for_vllm_is_that_of_the_documentation() -> None:
    for page in ("README.md", "docs/getting_started/install.md"):
        text = (ROOT / page).read_text().replace("\\\n  ", "")
        assert all(line in text.splitlines() for line in VLLM_RECIPE.splitlines())


def test_a_vllm_out_of_range(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    add_distribution(tmp_path, "vllm", "0.31.0")
    result = run(CURRENT_PLATFORM, tmp_path)
    assert "platform NPUPlatform" not in result.stdout
    assert len(sentences(result, "vLLM 0.31.0 is outside the tested range >=0.32.0,<0.34")) == 1


def test_vllm_plugins_that_name_half_of_us(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    # vLLM asks the platform for its warnings when it sets up logging.
    asked = "; import vllm.logger; current_platform.log_warnings()"
    result = run(CURRENT_PLATFORM + asked, VLLM_PLUGINS="npu,npu_ops")
    assert "platform NPUPlatform" in result.stdout
    assert len(sentences(result, f"VLLM_PLUGINS={ALL_PLUGINS}")) == 1


def test_a_second_platform_plugin(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    add_distribution(tmp_path, "other-platform", "1.0", **OTHER_PLATFORM)
    result = run(CURRENT_PLATFORM, tmp_path)
    assert "Only one platform plugin can be activated" in result.stderr.splitlines()[-1]
    # One of the ways out that the doctor names.
    result = run(CURRENT_PLATFORM, tmp_path, VLLM_PLUGINS=ALL_PLUGINS)
    assert "platform NPUPlatform" in result.stdout


def test_a_complete_installation_is_healthy_and_knows_the_variables_of_all_four() -> None:
    assert problems(NPU_TUNE="0", NPU_ISA="scalar", NPU_STATLOGGER_INTERVAL="5") == []


def test_a_misspelt_variable_is_told() -> None:
    problem = only(problems(NPU_STATLOGGER_PTAH="stats.jsonl"))
    assert "Did you mean NPU_STATLOGGER_PATH?" in problem["remedy"]


def test_an_instruction_set_that_the_processor_lacks(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    isas = npu_ops.native.isas()
    lacking = next((isa for isa in isas if not npu_ops.native.can_run(isa)), None)
    if lacking is None:
        pytest.skip(f"this processor has all of {', '.join(isas)}")
    problem = only(problems(NPU_ISA=lacking))
    assert lacking in problem["detail"]
    result = run("import npu_ops", NPU_ISA=lacking)
    assert result.returncode == 1
    assert lacking in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_without_wide_instructions_the_ops_work(isa: str, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    norm = "torch.ops.npu_ops.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)"
    result = run(f"import torch, npu_ops; print(npu_ops.native.isa(), {norm}.sum().item())", NPU_ISA=isa)
    used, total = result.stdout.split()
    assert used == isa
    assert float(total) == pytest.approx(16, rel=1e-4)
