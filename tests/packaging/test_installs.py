"""Each distribution alone, and all together, from wheels: it works, and nothing that was there is replaced."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.environments import PACKAGES, Environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USE_ALONE = {
    "npu-platform": "import torch; assert torch.ones(2, device='npu').sum().item() == 2",
    "npu-ops": "import torch, npu_ops; print(torch.ops.npu_ops.silu_and_mul(torch.ones(2, 4)))",
    "npu-kvconnector": "import npu_kvconnector; from npu_kvconnector import cli; print(npu_kvconnector.__name__)",
    "npu-statlogger": "from npu_statlogger.cli import main; assert main(['dashboard', 'alerts']) == main(['doctor']) == 0",
}
"""What must work in an environment with torch and this distribution, and without vLLM."""


OWN_PLATFORM = """
import vllm.platforms
from vllm.platforms.interface import Platform, PlatformEnum
class Ours(Platform):
    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
vllm.platforms._current_platform = Ours()
"""
USE_WITH_VLLM = {
    "npu-ops": f"""{OWN_PLATFORM}
from vllm.plugins import load_general_plugins
from vllm.model_executor.custom_op import op_registry_oot
load_general_plugins()
assert "SiluAndMul" in op_registry_oot
""",
    "npu-kvconnector": """
from vllm.plugins import load_general_plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
load_general_plugins()
assert "NPUOffloadConnector" in KVConnectorFactory._registry
""",
    "npu-statlogger": """
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
assert len(load_stat_logger_plugin_factories()) == 1
""",
}
"""What must work in an environment with vLLM and this distribution alone; npu-platform answers questions there."""


DEPENDENCIES = {"npu-kvconnector": {"psutil", "blake3", "xxhash", "lmdb", "tqdm"}}
"""What a distribution brings beside torch and numpy."""


def cuda(versions: dict[str, str]) -> set[str]:
    return {name for name in versions if name.startswith(("nvidia-", "cuda-")) or name == "triton"}


@pytest.mark.parametrize("name", PACKAGES)
def test_one_alone_adds_itself_and_works(name: str, wheels: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "venv")
    environment.install_locked_torch()
    before = environment.versions()
    environment.install(name, wheels=wheels)
    after = environment.versions()
    assert after.keys() - before.keys() == {name} | DEPENDENCIES.get(name, set())
    assert {kept: after[kept] for kept in before} == before
    assert cuda(after) == cuda(before)
    environment.run(USE_ALONE[name])


@pytest.mark.nightly
def test_one_alone_serves_vllm(wheels: Path, with_vllm: Environment) -> None:
    with installed("npu-platform", wheels, with_vllm):
        demo = json.loads(with_vllm.script("npu", "demo", "--json").stdout)
        assert [answer["right"] for answer in demo["answers"]] == [True] * 4
    for name, code in USE_WITH_VLLM.items():
        with installed(name, wheels, with_vllm):
            with_vllm.run(code)


@contextlib.contextmanager
def installed(name: str, wheels: Path, environment: Environment) -> Iterator[None]:
    environment.install(name, wheels=wheels)
    try:
        yield
    finally:
        environment.uninstall(name)


def test_all_together_add_themselves_and_leave_torch_and_vllm_alone(wheels: Path, with_vllm: Environment) -> None:
    before = with_vllm.versions()
    assert "vllm" in before
    with_vllm.install("npu-platform[all]", wheels=wheels)
    after = with_vllm.versions()
    assert after.keys() - before.keys() == set(PACKAGES).union(*DEPENDENCIES.values()) - before.keys()
    assert {kept: after[kept] for kept in before} == before
    assert len({after[name] for name in PACKAGES}) == 1
    shown = with_vllm.run("from vllm.platforms import current_platform; print(type(current_platform).__name__)")
    assert shown.stdout.splitlines()[-1] == "NPUPlatform"
