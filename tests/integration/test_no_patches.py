"""In a step of the engine and after a run, no module and no class of vLLM, torch or transformers holds anything of ours.

While a worker starts, it is exactly what `npu_platform.compat` lists. Registries (dictionaries that their owners offer) may hold our classes, and `torch.npu` is what torch registers for a
device; everything else that is ours and hangs off a foreign module or class is a patch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from npu_platform import compat
from tests.support.environments import ROOT
from tests.support.models import tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

OURS = {"npu_platform", "npu_ops", "npu_kvconnector", "npu_statlogger", "tests"}
WITHOUT_US = {
    "NPU_DEVICE": "off",
    "VLLM_PLUGINS": "",
    "VLLM_TARGET_DEVICE": "cpu",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
WITH_TRITON = {"CUDA_VISIBLE_DEVICES": ""}  # an empty one lets vLLM take Triton without a device
RUNNERS = {"V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}
OF_RUNNER = {"V1": "gpu_model_runner:GPUModelRunner", "V2": "gpu.model_runner:GPUModelRunner"}
UVA = "get_accelerator_view_from_cpu_tensor"
WHILE_IT_STARTS = {
    "V1": {
        "construction": {},
        "profile": {},
        "capture": {"vllm.v1.worker.gpu_model_runner": "graph_capture", "vllm.v1.worker.gpu_worker": "kernel_warmup"},
    },
    "V2": {
        "construction": {
            "vllm.v1.worker.gpu.buffer_utils": "UvaBuffer",
            "vllm.model_executor.offloader.uva": UVA,
            "vllm.model_executor.model_loader.utils": UVA,
        },
        "profile": {},
        "capture": {"vllm.v1.worker.gpu_worker": "kernel_warmup warmup_kernels"},
    },
}


def listing(command: str, argument: Path, **environ: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.attributes", command, str(argument)],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["V2", pytest.param("V1", marks=pytest.mark.nightly)])
def runner(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def after_a_run(runner: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    # In this process, so that the engine's modules are the ones that are looked at.
    return listing("run", model, VLLM_ENABLE_V1_MULTIPROCESSING="0", **RUNNERS[runner])


@pytest.fixture(scope="module")
def without_us(after_a_run: dict[str, Any], runner: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = tmp_path_factory.mktemp("names") / "modules.json"
    names.write_text(json.dumps(after_a_run["modules"]))
    return listing("import", names, **WITHOUT_US, **(WITH_TRITON if runner == "V2" else {}))


def test_the_two_processes_are_comparable(runner: str, after_a_run: dict[str, Any], without_us: dict[str, Any]) -> None:
    assert after_a_run["device"] is not None
    assert without_us["device"] is None
    common = after_a_run["code"].keys() & without_us["code"].keys()
    assert len(common) > 0.9 * len(after_a_run["code"])
    assert f"vllm.v1.worker.{OF_RUNNER[runner]}.execute_model" in common
    assert after_a_run["runner"] == runner


def test_the_witness_saw_every_moment(after_a_run: dict[str, Any]) -> None:
    assert after_a_run["during"].keys() == {"construction", "profile", "capture", "step", "sampling"}


@pytest.mark.parametrize("moment", ["step", "sampling"])
def test_nothing_is_substituted_in_a_step(moment: str, after_a_run: dict[str, Any]) -> None:
    assert after_a_run["during"][moment] == {}


@pytest.mark.parametrize("moment", ["construction", "profile", "capture"])
def test_what_is_substituted_while_a_worker_starts(moment: str, runner: str, after_a_run: dict[str, Any]) -> None:
    expected = [(module, name) for module, names in WHILE_IT_STARTS[runner][moment].items() for name in names.split()]
    assert after_a_run["during"][moment].keys() == {f"{module}:{name}" for module, name in expected}
    assert all(name in compat.SUBSTITUTED[module] for module, name in expected)


def test_nothing_of_ours_hangs_off_a_foreign_module_or_class(after_a_run: dict[str, Any]) -> None:
    ours = {
        key: origin
        for key, origin in after_a_run["code"].items()
        if (origin.partition(":")[0] in OURS or origin == "unittest:mock")
        and not key.startswith(("torch.npu:", "torch.npu."))
    }
    assert ours == {}


def test_nothing_of_theirs_comes_from_elsewhere_than_without_us(
    after_a_run: dict[str, Any], without_us: dict[str, Any]
) -> None:
    def package(origin: str) -> str:
        return origin.partition(":")[0]

    moved = {
        key: (origin, after_a_run["code"][key])
        for key, origin in without_us["code"].items()
        if key in after_a_run["code"] and package(after_a_run["code"][key]) != package(origin)
    }
    assert moved == {}
    device = {
        key: origin
        for key, origin in after_a_run["code"].items()
        if key.startswith("torch.cuda:") and origin != without_us["code"].get(key, origin)
    }
    assert device == {}
