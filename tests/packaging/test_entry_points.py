"""The entry points are exactly the documented ones: vLLM's VLLM_PLUGINS lists them by name."""

from __future__ import annotations

import configparser
import dataclasses
import importlib.metadata
import zipfile
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.config import StatLoggerConfig
from tests.support.environments import PACKAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTED = {
    "npu-platform": {
        "console_scripts": {"npu": "npu_platform.cli:main"},
        "torch.backends": {"npu": "npu_platform.torch_npu:autoload"},
        "triton.backends": {"npu": "npu_platform.triton"},
        "vllm.platform_plugins": {"npu": "npu_platform:register"},
    },
    "npu-ops": {
        "vllm.general_plugins": {"npu_ops": "npu_ops:register"},
        "npu.environment_variables": {
            "NPU_HEAD_BITS": "npu_ops.config:OpsConfig",
            "NPU_ISA": "npu_ops.config:OpsConfig",
            "NPU_TUNE": "npu_ops.config:OpsConfig",
        },
    },
    "npu-kvconnector": {
        "console_scripts": {"npu-kv": "npu_kvconnector.cli:main"},
        "vllm.general_plugins": {"npu_kvconnector": "npu_kvconnector:register"},
    },
    "npu-statlogger": {
        "console_scripts": {"npu-stat": "npu_statlogger.cli:main"},
        "vllm.stat_logger_plugins": {"npu_statlogger": "npu_statlogger:NPUStatLogger"},
        "npu.environment_variables": {
            f"NPU_STATLOGGER_{field.name.upper()}": "npu_statlogger.config:StatLoggerConfig"
            for field in dataclasses.fields(StatLoggerConfig)
        },
    },
}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_wheel_declares_them(name: str, wheels: Path) -> None:
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/entry_points.txt")]
        declared = configparser.ConfigParser(delimiters="=")
        declared.optionxform = str  # variables are in capitals
        declared.read_string(archive.read(entry).decode())
    assert {group: dict(declared[group]) for group in declared.sections()} == DOCUMENTED[name]


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_installed_declares_them(name: str) -> None:
    points = importlib.metadata.distribution(name).entry_points
    assert {(point.group, point.name) for point in points} == {
        (group, point) for group, named in DOCUMENTED[name].items() for point in named
    }
    for point in points:
        point.load()


@pytest.mark.parametrize("name", PACKAGES)
def test_the_documentation_names_them(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "entry_points.md").read_text()
    for group, points in DOCUMENTED[name].items():
        for point, target in points.items():
            assert f"| {name} | `{group}` | `{point}` | `{target}` |" in page
