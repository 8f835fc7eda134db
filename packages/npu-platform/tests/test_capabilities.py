"""What a vendor's package says of its device decides what is chosen, refused and computed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_platform import capabilities
from npu_platform.capabilities import Capabilities
from npu_platform.errors import ConfigurationError
from tests.support import models
from tests.support.environments import add_distribution
from tests.support.vllm_process import run_program

LIMITED = """
import torch
from npu_platform.capabilities import Capabilities
said = Capabilities(dtypes=(torch.float16,), graphs=False, needs_compilation=True, reads_host_memory=False)
"""
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from npu_platform import capabilities
capabilities.of_device.cache_clear()
from vllm.engine.arg_utils import EngineArgs
try:
    made = EngineArgs(model=sys.argv[2], skip_tokenizer_init=True, max_model_len=64, **json.loads(sys.argv[3]))
    one = made.create_engine_config()
    said = [one.model_config.dtype, one.compilation_config.cudagraph_mode.name, one.compilation_config.mode.name]
    print("SAID", *said)
except Exception as error:
    print("REFUSED", " ".join(str(error).split()))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_qwen3(tmp_path_factory.mktemp("limits") / "model")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    entry_points = f"[{capabilities.GROUP}]\nsimulator = limited_device:said\n"
    add_distribution(folder, "limited-device", "1.0", entry_points, limited_device=LIMITED)
    return folder


def said(site: Path, model: Path, **engine: Any) -> str:
    done = run_program(PROGRAM, str(site), str(model), json.dumps(engine), NPU_DEVICE="simulator")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("SAID", "REFUSED"))]
    assert lines, done.stderr[-3000:]
    return lines[-1]


def test_what_the_device_has_not_is_not_chosen(site: Path, model: Path) -> None:
    assert said(site, model, dtype="float16") == "SAID torch.float16 NONE VLLM_COMPILE"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"dtype": "float32"}, "computes in float16, not in float32: pass --dtype float16"),
        ({"dtype": "float16", "enforce_eager": True}, "runs compiled models only: leave out --enforce-eager"),
        (
            {"dtype": "float16", "cpu_offload_gb": 1},
            "does not read the host's memory: instead of --cpu-offload-gb pass",
        ),
        ({"dtype": "float16", "compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "has no graphs: leave out"),
    ],
)
def test_what_the_device_has_not_is_refused(asked: dict[str, Any], sentence: str, site: Path, model: Path) -> None:
    answer = said(site, model, **asked)
    assert answer.startswith("REFUSED")
    assert sentence in answer


@pytest.mark.parametrize("choice", ["simulator", "/opt/vendor/lib/libvendor.so.1"])
def test_the_entry_point_is_named_as_the_library(choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vendor" if "vendor" in choice else choice
    entry_points = f"[{capabilities.GROUP}]\n{name} = one_device:said\nother = other_device:said\n"
    module = "from npu_platform.capabilities import Capabilities\nsaid = Capabilities(graphs=False)\n"
    add_distribution(tmp_path, "one-device", "1.0", entry_points, one_device=module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NPU_DEVICE", choice)
    assert capabilities.of_device.__wrapped__() == Capabilities(graphs=False)


def test_two_packages_for_one_library_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one-device", "two-device"):
        add_distribution(tmp_path, name, "1.0", f"[{capabilities.GROUP}]\nvendor = {name[:3]}_device:said\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NPU_DEVICE", "/opt/libvendor.so")
    with pytest.raises(ConfigurationError, match=r"not (one|two)-device and (one|two)-device: uninstall one"):
        capabilities.of_device.__wrapped__()


def test_the_communicator_is_the_vendors(tmp_path: Path) -> None:
    entry_points = f"[{capabilities.GROUP}]\nsimulator = ring_device:said\n"
    module = "from npu_platform.capabilities import Capabilities\nsaid = Capabilities(communicator='ring.Ring')\n"
    add_distribution(tmp_path, "ring-device", "1.0", entry_points, ring_device=module)
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from npu_platform import capabilities
capabilities.of_device.cache_clear()
from vllm.platforms import current_platform
print(current_platform.get_device_communicator_cls())
"""
    done = run_program(program, str(tmp_path), NPU_DEVICE="simulator")
    assert done.stdout.splitlines()[-1:] == ["ring.Ring"], done.stderr[-3000:]


def test_without_an_entry_point_it_is_the_software_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_DEVICE", "simulator")
    assert capabilities.of_device.__wrapped__() == Capabilities()
    assert torch.bfloat16 in Capabilities().dtypes
