from __future__ import annotations

import dataclasses

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
