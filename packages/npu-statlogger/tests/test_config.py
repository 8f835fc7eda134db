"""Settings: both sources, their precedence, and what is refused."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from npu_statlogger.config import SECTION, SINKS, StatLoggerConfig, host_and_port
from npu_statlogger.errors import ConfigError


def test_nothing_set_means_off() -> None:
    assert StatLoggerConfig.read({}, {}).path is None
    assert StatLoggerConfig.read({"npu": {"x": 1}}, {"NPU_DEVICE": "off"}).path is None


def test_the_environment_alone() -> None:
    config = StatLoggerConfig.read({}, {"NPU_STATLOGGER_PATH": "a.jsonl", "NPU_STATLOGGER_INTERVAL": "2.5"})
    assert config == StatLoggerConfig(Path("a.jsonl"), 2.5)


def test_additional_config_wins_over_the_environment() -> None:
    environ = {"NPU_STATLOGGER_PATH": "a.jsonl", "NPU_STATLOGGER_INTERVAL": "2.5"}
    assert StatLoggerConfig.read({SECTION: {"path": "b.jsonl"}}, environ) == StatLoggerConfig(Path("b.jsonl"), 2.5)


def test_additional_config_may_be_an_object_of_vllm_s_user() -> None:
    assert StatLoggerConfig.read(object(), {}) == StatLoggerConfig()


@pytest.mark.parametrize(
    ("section", "environ", "sentence"),
    [
        ({"pth": "a"}, {}, "unknown setting 'pth'; did you mean 'path'"),
        ({}, {"NPU_STATLOGGER_INTERVALL": "1"}, "did you mean 'NPU_STATLOGGER_INTERVAL'"),
        ("a.jsonl", {}, "must be an object"),
        ({"path": 3}, {}, "name of a file or directory; got 3"),
        ({"path": ""}, {}, "name of a file"),
        ({"interval": 5}, {}, "interval is set but path is not"),
        ({"path": "a", "interval": 0}, {}, "above 0; got 0"),
        ({"path": "a", "interval": "soon"}, {}, "above 0; got 'soon'"),
        ({"path": "a", "interval": True}, {}, "above 0; got True"),
        ({"path": "a", "interval": None}, {}, "above 0; got None"),
        ({"path": "a", "interval": 10**400}, {}, "above 0; got 1000"),
        ({"path": "~nosuchuser/x"}, {}, "path is '~nosuchuser/x', a home directory that is not known"),
        ({"path": "a", "csv": "./a"}, {}, "path and csv name one file, a, whose lines would mix"),
        ({"csv": "a"}, {"NPU_STATLOGGER_SQLITE": "b/../a"}, "csv and sqlite name one file"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_way_out(
    section: object, environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StatLoggerConfig.read({SECTION: section}, environ)


def test_every_setting_is_read_from_the_environment() -> None:
    given = {
        "PATH": "a", "INTERVAL": "2", "REQUESTS": "0.5", "SLOW_SECONDS": "3", "REQUEST_IDS": "plain", "STEPS": "1",
        "ROTATE_MIB": "64", "ROTATE_HOURS": "24", "KEEP": "7", "COMPRESS": "false", "CSV": "b", "SQLITE": "c",
        "PARQUET": "d", "PROMETHEUS": "vllm", "PUSH": "http://h:9", "OTLP": "http://h:4318", "TENSORBOARD": "e",
        "WANDB": "f", "STATSD": "h:8125",
    }  # fmt: skip
    config = StatLoggerConfig.read({}, {f"NPU_STATLOGGER_{name}": value for name, value in given.items()})
    assert config == StatLoggerConfig(
        Path("a"), 2, 0.5, 3, "plain", 1, 64, 24, 7, False, Path("b"), Path("c"), Path("d"), "vllm", "http://h:9",
        "http://h:4318", Path("e"), Path("f"), "h:8125",
    )  # fmt: skip
    assert {field.name.upper() for field in fields(StatLoggerConfig)} == set(given)


@pytest.mark.parametrize("sink", SINKS)
def test_any_sink_alone_switches_the_logger_on(sink: str) -> None:
    place = "h:8125" if sink in ("prometheus", "statsd") else "http://h:9"
    assert StatLoggerConfig.read({SECTION: {sink: place}}, {}).on


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("requests", 1.5, "fraction from 0 to 1; got 1.5"),
        ("steps", -1, "not below 0; got -1"),
        ("keep", 2.5, "whole number; got 2.5"),
        ("compress", "perhaps", "true or false (1 or 0); got 'perhaps'"),
        ("request_ids", "all", "hash, plain or none; got 'all'"),
        ("prometheus", "9090", "HOST:PORT, or vllm; got '9090'"),
        ("statsd", "host:99999", "HOST:PORT; got 'host:99999'"),
        ("statsd", "vllm", "HOST:PORT; got 'vllm'"),
        ("otlp", "collector:4318", "begins with http:// or https://; got 'collector:4318'"),
        ("csv", 3, "csv must be the name of a file or directory; got 3"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(setting: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        StatLoggerConfig.read({SECTION: {"path": "a", setting: value}}, {})


def test_a_password_in_a_url_is_not_shown() -> None:
    config = StatLoggerConfig.read({SECTION: {"otlp": "https://me:secret@collector:4318/x", "path": "a"}}, {})
    assert config.places() == {"path": "a", "otlp": "https://collector:4318/x"}
    config = StatLoggerConfig.read({SECTION: {"push": "http://me:p@ss@gateway/a@b"}}, {})
    assert config.places() == {"push": "http://gateway/a@b"}


def test_directories_may_be_shared() -> None:
    assert StatLoggerConfig.read({SECTION: {"parquet": "d", "tensorboard": "d", "wandb": "d"}}, {}).on


@pytest.mark.parametrize(
    ("address", "parts"), [("h:1", ("h", 1)), ("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:9100", ("::1", 9100))]
)
def test_the_parts_of_an_address(address: str, parts: tuple[str, int]) -> None:
    assert host_and_port(address) == parts
