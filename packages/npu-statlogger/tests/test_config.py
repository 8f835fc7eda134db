"""Settings: both sources, their precedence, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_statlogger.config import SECTION, StatLoggerConfig
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
        ({"path": 3}, {}, "name of a file; got 3"),
        ({"path": ""}, {}, "name of a file"),
        ({"interval": 5}, {}, "interval is set but path is not"),
        ({"path": "a", "interval": 0}, {}, "above 0; got 0"),
        ({"path": "a", "interval": "soon"}, {}, "above 0; got 'soon'"),
        ({"path": "a", "interval": True}, {}, "above 0; got True"),
        ({"path": "a", "interval": None}, {}, "above 0; got None"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_way_out(
    section: object, environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StatLoggerConfig.read({SECTION: section}, environ)
