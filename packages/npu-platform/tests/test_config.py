from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from npu_platform import config
from npu_platform.config import ENVIRONMENT, NPUConfig
from npu_platform.errors import ConfigurationError


def test_defaults_without_a_section() -> None:
    assert NPUConfig.from_additional_config({"npu_statlogger": {"path": "x"}}) == NPUConfig()
    assert NPUConfig.from_additional_config({}) == NPUConfig()


def test_values_are_taken() -> None:
    parsed = NPUConfig.from_additional_config({"npu": {"num_threads": 3, "sampler": "torch"}})
    assert (parsed.num_threads, parsed.sampler) == (3, "torch")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"num_thread": 2}, "no setting 'num_thread'; did you mean 'num_threads'"),
        ({"colour": 2}, "the settings are num_threads, sampler"),
        ({"num_threads": 0}, "at least 1, not 0"),
        ({"num_threads": True}, "not True"),
        ({"num_threads": "2"}, "not '2'"),
        ({"sampler": "fast"}, "not 'fast'"),
        ({"sleep_folder": "/nowhere/at/all"}, "a folder that can be written to, not '/nowhere/at/all'"),
        ({"sleep_folder": 3}, "not 3"),
        ({"stopped_seconds": 0}, "at least 1, not 0; null waits"),
        ([], "must be a table"),
    ],
)
def test_bad_settings_name_the_setting_the_value_and_the_remedy(section: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        NPUConfig.from_additional_config({"npu": section})


def test_public_surface_is_frozen() -> None:
    settings = {"num_threads", "sampler", "sleep_folder", "stopped_seconds"}
    assert {field.name for field in dataclasses.fields(NPUConfig)} == settings
    assert len(ENVIRONMENT) <= 8
    assert all(name.startswith("NPU_") for name in ENVIRONMENT)


def test_a_process_without_a_device_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_VISIBLE_DEVICES", raising=False)
    config.require_devices(1)
    with pytest.raises(ConfigurationError, match="The driver has no npu device"):
        config.require_devices(0)
    monkeypatch.setenv("NPU_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigurationError, match="NPU_VISIBLE_DEVICES must name a device, not '', .* unset it"):
        config.require_devices(0)


def test_device_choice() -> None:
    assert config.device_choice({}) == "auto"
    assert config.device_choice({"NPU_DEVICE": "Off"}) == "off"
    assert config.device_choice({"NPU_DEVICE": "null:launch=5us"}) == "null"
    assert config.device_choice({"NPU_DEVICE": "/opt/Vendor/lib.so:fast"}) == "/opt/Vendor/lib.so"
    assert [config.is_forced(choice) for choice in ("auto", "off", "null", "/lib.so")] == [False, False, True, True]
    with pytest.raises(
        ConfigurationError, match="NPU_DEVICE must be auto, simulator, null, off or the path of a driver, not 'gpu'"
    ):
        config.device_choice({"NPU_DEVICE": "gpu"})


def test_plugin_allow_list() -> None:
    assert config.plugin_allow_list({}) is None
    assert config.plugin_allow_list({"VLLM_PLUGINS": ""}) == []
    assert config.plugin_allow_list({"VLLM_PLUGINS": "npu, npu_ops,"}) == ["npu", "npu_ops"]


@pytest.fixture
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(config, "_why_runner", None)
    for name in ("_NPU_CHOSEN", "TRITON_DEFAULT_BACKEND", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "asks", "is_open"),
    [
        ({}, None, True),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, True, False),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, False, False),
        ({"TRITON_DEFAULT_BACKEND": "npu"}, True, True),
        ({"TRITON_DEFAULT_BACKEND": "npu", "VLLM_USE_V2_MODEL_RUNNER": "0"}, True, False),
        ({"TRITON_DEFAULT_BACKEND": "nvidia"}, False, True),
        ({"TRITON_DEFAULT_BACKEND": "nvidia", "VLLM_USE_V2_MODEL_RUNNER": "1"}, True, False),
    ],
)
def test_what_the_user_says_of_triton_and_of_the_runner(
    given: dict[str, str], asks: bool | None, is_open: bool, nothing_chosen: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        nothing_chosen.setenv(name, value)
    for _ in range(2):  # engines
        config.begin_choice_of_runner()
        assert (config.asks_for_triton(), config.is_runner_open()) == (asks, is_open)
    if asks is False:
        assert config.what_leaves_triton_out() == "=".join(*given.items())


@pytest.mark.parametrize("given", [{}, {"TRITON_DEFAULT_BACKEND": "npu"}])
@pytest.mark.parametrize("triton", [False, True])
def test_a_runner_chosen_for_an_engine_is_forgotten_with_the_next(
    given: dict[str, str], triton: bool, nothing_chosen: pytest.MonkeyPatch
) -> None:
    """What is chosen is in the environment, for processes to come, but is nothing that the user said."""
    for name, value in given.items():
        nothing_chosen.setenv(name, value)
    asked = config.asks_for_triton()
    config.choose_runner(v2=True, why="V2 knows it", triton=triton)
    assert (config.chose_v2_runner(), config.is_runner_open(), config.why_this_runner()) == (True, False, "V2 knows it")
    assert os.environ.get("TRITON_DEFAULT_BACKEND") == ("npu" if triton or given else None)
    assert config.asks_for_triton() is asked
    config.begin_choice_of_runner()
    assert (config.chose_v2_runner(), config.is_runner_open()) == (False, True)
    assert os.environ.get("TRITON_DEFAULT_BACKEND") == given.get("TRITON_DEFAULT_BACKEND")


def test_what_the_user_sets_after_a_choice_is_the_users(nothing_chosen: pytest.MonkeyPatch) -> None:
    config.choose_runner(v2=True, why="V2 knows it", triton=True)
    nothing_chosen.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config.begin_choice_of_runner()
    assert (config.asks_for_triton(), config.is_runner_open()) == (False, False)
    assert config.why_this_runner() == "VLLM_USE_V2_MODEL_RUNNER=0"


PROGRAM = """
import os
from npu_platform import config
begun = config.asks_for_v2(), config.asks_for_triton(), config.chose_v2_runner()
config.begin_choice_of_runner()
print(begun, config.is_runner_open(), os.environ.get("TRITON_DEFAULT_BACKEND"))
"""


@pytest.mark.parametrize(
    ("of_the_user", "said"),
    [
        ({}, "(None, None, True) True None"),
        ({"TRITON_DEFAULT_BACKEND": "npu"}, "(None, True, True) True npu"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, "(True, True, True) False npu"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, "(False, True, False) False npu"),
    ],
)
def test_a_program_that_a_program_starts_chooses_for_itself(
    of_the_user: dict[str, str], said: str, nothing_chosen: pytest.MonkeyPatch
) -> None:
    """What was chosen for an engine is inherited, and kept until there is an engine of its own; what the user set stays."""
    if of_the_user.get("VLLM_USE_V2_MODEL_RUNNER") is None:
        for name, value in of_the_user.items():
            nothing_chosen.setenv(name, value)
        config.choose_runner(v2=True, why="V2 knows it", triton=True)
    else:
        for name, value in (of_the_user | {"TRITON_DEFAULT_BACKEND": "npu"}).items():
            nothing_chosen.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


def test_what_the_user_sets_for_a_program_that_a_program_starts_is_the_users(
    nothing_chosen: pytest.MonkeyPatch,
) -> None:
    config.choose_runner(v2=True, why="V2 knows it", triton=True)
    environ = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(False, False, False) False None"


def test_a_ray_of_the_user_keeps_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", "")  # so that it is put back
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES")
    config.offer_devices_to_ray(3)
    assert os.environ["RAY_OVERRIDE_RESOURCES"] == '{"NPU": 3}'
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"NPU": 1}')
    config.offer_devices_to_ray(3)
    assert os.environ["RAY_OVERRIDE_RESOURCES"] == '{"NPU": 1}'
