"""One version number, exact pins between the four, and the requirements that a user's installer sees."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email.parser import Parser
from typing import TYPE_CHECKING

import pytest

from tests.support.environments import PACKAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
VLLM = "vllm<0.34,>=0.32.0"

REQUIREMENTS = {
    "npu-platform": {"torch<2.15,>=2.13", "numpy"},
    "npu-ops": {"torch<3,>=2.10"},
    "npu-kvconnector": {
        "torch<2.15,>=2.13",
        "numpy",
        "psutil",
        "blake3>=1.0",
        "xxhash>=3.5",
        "lmdb>=1.6",
        "tqdm>=4.66",
    },
    "npu-statlogger": {"numpy"},
}
EXTRAS = {
    "npu-platform": {
        "vllm": {VLLM},
        "vision": {"torchvision<0.30,>=0.28"},
        "triton": {"triton<4,>=3.5"},
        "ray": {"ray>=2.48"},
        "suffix": {"arctic-inference==0.1.1"},
        "ops": {f"npu-ops=={VERSION}"},
        "kvconnector": {f"npu-kvconnector=={VERSION}"},
        "statlogger": {f"npu-statlogger=={VERSION}"},
        "all": {f"{name}=={VERSION}" for name in PACKAGES if name != "npu-platform"},
    },
    "npu-ops": {"vllm": {VLLM}},
    "npu-kvconnector": {
        "vllm": {VLLM},
        "remote": {"obstore<0.13,>=0.9", "valkey>=6.1", "zstandard>=0.23"},
        "nixl": {"nixl>=1.4"},
        "encryption": {"cryptography>=43"},
    },
    "npu-statlogger": {
        "vllm": {VLLM},
        "otlp": {"opentelemetry-sdk>=1.27", "opentelemetry-exporter-otlp-proto-http>=1.27"},
        "parquet": {"pyarrow>=18"},
        "prometheus": {"prometheus-client>=0.21"},
        "push": {"prometheus-client>=0.21"},
        "statsd": {"statsd>=4"},
        "tensorboard": {"tensorboard>=2.18"},
        "wandb": {"wandb>=0.19"},
        "top": {"rich>=13.9"},
        "replay": {"aiohttp>=3.10"},
    },
}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_source_holds_the_version_and_exact_pins(name: str) -> None:
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    pins = [pin for extra in project["optional-dependencies"].values() for pin in extra if pin.startswith("npu-")]
    assert all(pin.partition("==")[2] == VERSION for pin in pins)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_wheel_requires_what_is_documented(name: str, wheels: Path) -> None:
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-{VERSION}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA")]
        fields = Parser().parsestr(archive.read(metadata).decode())
    required: dict[str, set[str]] = {}
    for requirement in fields.get_all("Requires-Dist", []):
        need, _, marker = requirement.partition(";")
        extra = re.fullmatch(r" *extra == '(\w+)'", marker)
        assert extra or not marker, f"unexpected marker in {requirement!r}"
        required.setdefault(extra.group(1) if extra else "", set()).add(_normal(need))
    assert required.pop("") == {_normal(need) for need in REQUIREMENTS[name]}
    assert required == {extra: {_normal(need) for need in needs} for extra, needs in EXTRAS[name].items()}


def _normal(requirement: str) -> str:
    name, specifiers = re.fullmatch(r"\s*([\w-]+)\s*(.*?)\s*", requirement).groups()
    return name + ",".join(sorted(specifiers.strip("()").split(",")))
