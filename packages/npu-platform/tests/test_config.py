from __future__ import annotations

import dataclasses
import os

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
    for name in ("TRITON_DEFAULT_BACKEND", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "is_open", "chosen"),
    [
        ({}, False, "0"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, False, "1"),
        ({"TRITON_DEFAULT_BACKEND": "npu"}, True, None),
        ({"TRITON_DEFAULT_BACKEND": "npu", "VLLM_USE_V2_MODEL_RUNNER": "0"}, False, "0"),
        ({"TRITON_DEFAULT_BACKEND": "nvidia"}, False, "0"),
    ],
)
def test_the_runner_is_open_where_triton_is_asked_for_and_no_runner(
    given: dict[str, str], is_open: bool, chosen: str | None, nothing_chosen: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        nothing_chosen.setenv(name, value)
    config.begin_choice_of_runner()
    assert (config.is_runner_open(), os.environ.get("VLLM_USE_V2_MODEL_RUNNER")) == (is_open, chosen)
    config.begin_choice_of_runner()  # the next engine's
    assert (config.is_runner_open(), os.environ.get("VLLM_USE_V2_MODEL_RUNNER")) == (is_open, chosen)


def test_a_runner_chosen_for_an_engine_is_forgotten_with_the_next(nothing_chosen: pytest.MonkeyPatch) -> None:
    nothing_chosen.setenv("TRITON_DEFAULT_BACKEND", "npu")
    config.choose_runner(v2=True, why="V2 knows it")
    assert (config.chose_v2_runner(), config.is_runner_open(), config.why_this_runner()) == (True, False, "V2 knows it")
    config.begin_choice_of_runner()
    assert (config.chose_v2_runner(), config.is_runner_open()) == (False, True)
