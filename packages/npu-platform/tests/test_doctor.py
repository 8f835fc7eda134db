"""`npu doctor` in environments with one thing wrong: it must name that thing, with the way out, and exit with 1."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from npu_platform import doctor
from tests.support.environments import add_distribution

DOCTOR = "import sys; from npu_platform.cli import main; sys.exit(main(['doctor', '--json']))"
NO_SIBLINGS = f"""
import importlib.metadata
every = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **group: () if group == {{"group": "npu.environment_variables"}} else every(**group)
{DOCTOR}
"""
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("NPU_", "VLLM_"))}


def examine(code: str = DOCTOR, *flags: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """Run doctor in a fresh process, because a process decides once; return exit code and findings."""
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN | environment, timeout=120, check=False)
    assert done.stdout.startswith("{"), done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] == (done.returncode == 0)
    return done.returncode, report["findings"]


def problems(findings: list[dict[str, Any]]) -> list[str]:
    return [f"{finding['detail']} {finding['remedy']}" for finding in findings if not finding["ok"]]


def test_healthy_environment_has_no_problem() -> None:
    code, findings = examine()
    assert code == 0, problems(findings)
    winner = next(finding for finding in findings if finding["name"] == "winner")
    assert winner["detail"].startswith("npu, because")
    loaded = [
        finding["name"] for finding in findings if finding["section"] == "plugins" and "loaded" in finding["detail"]
    ]
    assert {"torch.backends npu", "vllm.platform_plugins npu"} <= set(loaded)
    assert any(finding["name"] == "npu:0" for finding in findings)
    nodes = next(finding for finding in findings if finding["name"] == "memory nodes")
    cores = [int(each) for each in re.findall(r"node \d+ beside (\d+) of the cores", nodes["detail"])]
    assert sum(cores) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environment", "detail"),
    [
        ({}, "vLLM's V2, or V1 for what V2 does not have"),
        pytest.param(
            {"TRITON_DEFAULT_BACKEND": "nvidia"},
            "vLLM's V1: TRITON_DEFAULT_BACKEND=nvidia",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"CXX": "no-such-compiler"},
            "vLLM's V1: there is no C++ compiler for Triton kernels (apt install g++",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            "vLLM's V1, as VLLM_USE_V2_MODEL_RUNNER says",
            marks=pytest.mark.nightly,
        ),
        (
            {"VLLM_USE_V2_MODEL_RUNNER": "1", "CXX": "no-such-compiler", "TRITON_CACHE_DIR": "/nowhere"},
            "vLLM's V2, as VLLM_USE_V2_MODEL_RUNNER says, which would be refused: there is no C++ compiler",
        ),
    ],
)
def test_the_model_runner_is_named(environment: dict[str, str], detail: str) -> None:
    pytest.importorskip("triton")
    code, findings = examine(**environment)
    assert code == 0, problems(findings)
    runner = next(finding for finding in findings if finding["name"] == "model runner")
    assert runner["detail"].startswith(detail)


@pytest.mark.parametrize(
    ("environment", "sentence", "remedy"),
    [
        pytest.param(
            {"VLLM_TARGET_DEVICE": "cpu"},
            "VLLM_TARGET_DEVICE=cpu makes vLLM skip every platform plugin",
            "Unset",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"NPU_DEVICE": "off"},
            "NPU_DEVICE=off switches the npu platform off",
            "Unset NPU_DEVICE",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"NPU_DEVICE": "gpu"},
            "NPU_DEVICE must be auto, simulator, null, off or the path of a driver, not 'gpu'",
            "Set NPU_DEVICE",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"NPU_VISIBLE_DEVICES": ""},
            "NPU_VISIBLE_DEVICES must name a device, not '', which hides all",
            "unset it",
            marks=pytest.mark.nightly,
        ),
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=other leaves out npu", "Set VLLM_PLUGINS=other,npu"),
    ],
    ids=["target device", "off", "unknown device", "no device", "plugins"],
)
def test_one_wrong_variable_is_one_sentence_with_its_remedy(
    environment: dict[str, str], sentence: str, remedy: str
) -> None:
    code, findings = examine(**environment)
    assert code == 1
    (problem,) = problems(findings)
    assert sentence in problem
    assert remedy in problem


def test_keys_are_not_shown() -> None:
    """What doctor says goes into reports to others."""
    code, findings = examine(VLLM_API_KEY="s3cret", VLLM_LOGGING_LEVEL="INFO", NPU_HUB_TOKEN="s3cret")
    shown = {finding["name"]: finding["detail"] for finding in findings if finding["section"] == "environment"}
    assert (code, shown["VLLM_API_KEY"], shown["VLLM_LOGGING_LEVEL"]) == (1, "(set, not shown)", "INFO")
    assert "s3cret" not in json.dumps(findings)


@pytest.mark.nightly  # by day tests/packaging/test_refusals.py does, with all four installed
def test_a_variable_that_nobody_reads_is_a_problem() -> None:
    remedies = {
        "NPU_SIMULATOR_MEMROY": "Did you mean NPU_SIMULATOR_MEMORY?",
        "NPU_SIMULATOR_DEVICE": "Did you mean NPU_SIMULATOR_DEVICES?",
        "NPU_STATLOGGER_PTAH": "Unset it; there are",  # its reader is not installed here
    }
    code, findings = examine(NO_SIBLINGS, **dict.fromkeys(remedies, "2"))
    assert code == 1
    found = problems(findings)
    assert len(found) == len(remedies)
    for name, remedy in remedies.items():
        (problem,) = [text for text in found if f"{name}=2 is without effect" in text]
        assert remedy in problem


@pytest.mark.nightly
def test_second_platform_plugin_is_named(tmp_path: Path) -> None:
    (tmp_path / "other_npu.py").write_text("def register():\n    return 'other_npu.Platform'\n")
    metadata = tmp_path / "other_npu-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-npu\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.platform_plugins]\nother = other_npu:register\n")
    code, findings = examine(PYTHONPATH=str(tmp_path))
    assert code == 1
    # Plugins that import vLLM fail as well, with vLLM's own words; the sentence that explains them must be there.
    (problem,) = [text for text in problems(findings) if "A second platform plugin" in text]
    assert "activates here as well (other from other-npu)" in problem
    assert "VLLM_PLUGINS" in problem
    _, findings = examine(PYTHONPATH=str(tmp_path), VLLM_PLUGINS="other")
    assert not [text for text in problems(findings) if "A second platform plugin" in text]


@pytest.mark.parametrize(
    ("said", "code", "detail"),
    [
        ("Capabilities(graphs=False)", 0, "graphs False (by limited-device)"),
        ("Capabilities(graph=False)", 1, "limited-device: TypeError: "),
    ],
)
def test_what_a_vendor_says_of_its_device_is_shown(said: str, code: int, detail: str, tmp_path: Path) -> None:
    module = f"from npu_platform.capabilities import Capabilities\nsaid = {said}\n"
    entry_points = "[npu_platform.capabilities]\nsimulator = limited_device:said\n"
    add_distribution(tmp_path, "limited-device", "1.0", entry_points, limited_device=module)
    its = CLEAN.get("PYTHONPATH", "")
    found, findings = examine(PYTHONPATH=f"{tmp_path}{os.pathsep}{its}", NPU_DEVICE="simulator")
    (shown,) = [finding for finding in findings if finding["name"] == "capabilities"]
    assert (found, shown["ok"]) == (code, code == 0)
    assert shown["detail"].startswith(detail)


@pytest.mark.parametrize(
    ("torch", "vllm", "fits"),
    [
        ("2.13.0+cpu", "0.32.0", True),
        ("2.14.1", "0.33.0", True),
        ("2.14.0", "0.32.0", False),
        ("2.13.0", "0.33.0", False),
        ("2.14.0", None, True),
        ("2.12.0", None, False),
        (None, "0.33.0", False),
    ],
)
def test_torch_is_the_one_that_vllm_pins(torch: str | None, vllm: str | None, fits: bool) -> None:
    found = doctor._torch(torch, vllm)
    assert found.ok is fits
    assert "vLLM 0.32 with torch 2.13 and vLLM 0.33 with torch 2.14" in found.detail
    assert (found.remedy is None) is fits


def test_without_vllm_it_still_works(tmp_path: Path) -> None:
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("vllm"):
            (tmp_path / entry.name).symlink_to(entry)
    code, findings = examine(f"import site; site.addsitedir({str(tmp_path)!r}); {DOCTOR}", "-S")
    assert code == 1
    (problem,) = problems(findings)
    assert "vLLM is not installed, so the npu platform stays off." in problem
    assert "pip install" in problem
