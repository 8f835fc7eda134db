"""The other kinds of lines: written, read back, and refused when damaged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.errors import FormatError
from npu_statlogger.lines import KINDS, Note, RequestLine, Run, StepLine, parse

if TYPE_CHECKING:
    from npu_statlogger.lines import Line

COMMON = {"time": 1.5, "process": "host:1"}
REQUEST = RequestLine(
    **COMMON, model="m", engine=1, request_id="ab", arrival=0.5, finish_reason="stop", e2e_seconds=1.0, queue_seconds=0.25,
    prefill_seconds=0.25, decode_seconds=0.5, inference_seconds=0.75, first_token_seconds=0.5, weight=4.0,
    time_per_output_token_seconds=0.25, prompt_tokens=7, cached_tokens=4, generation_tokens=3, max_tokens=0, preemptions=0,
    corrupted=0,
)  # fmt: skip
STEP = StepLine(
    **COMMON, engine=0, seconds=0.01, running=3, waiting=6, deferred=4, kv_cache_usage=0.25, prompt_tokens=30,
    cached_tokens=70, generation_tokens=3, first_tokens=1, finished=1, preemptions=1, draft_tokens=8, accepted_tokens=6,
    weight=1.0,
)  # fmt: skip
RUN = Run(**COMMON, model="m", versions={"vllm": "0.32.0"}, engines=[0, 1], settings={"interval": 10.0})
NOTE = Note(**COMMON, name="clock_jumped", text="The clock was set back by 3.0 s.", values={"seconds": -3.0})


@pytest.mark.parametrize("line", [REQUEST, STEP, RUN, NOTE], ids=lambda line: line.kind)
def test_a_line_read_back_is_the_line_written(line: Line) -> None:
    data = json.loads(json.dumps(line.to_dict(), allow_nan=False))
    assert list(data)[:2] == ["schema", "kind"]
    assert parse(data) == line


def test_keys_of_a_later_version_are_left_out() -> None:
    assert parse(STEP.to_dict() | {"power_watts": 7}) == STEP


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_line_without_its_keys_is_refused(kind: str) -> None:
    with pytest.raises(FormatError, match=f"not a line of kind '{kind}': .*missing"):
        parse({"schema": "npu-statlogger/2", "kind": kind, "time": 1.0})


@pytest.mark.parametrize(
    "change", [{"model": 3}, {"engine": "0"}, {"arrival": "soon"}, {"prompt_tokens": 1.5}, {"time": None}]
)
def test_a_value_of_the_wrong_type_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=f"not a line of kind 'request': {next(iter(change))} is"):
        parse(REQUEST.to_dict() | change)


def test_a_kind_of_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match="its kind is 'power'"):
        parse({"schema": "npu-statlogger/2", "kind": "power"})


def test_no_kind_has_a_place_for_a_prompt_or_an_answer() -> None:
    names = {name for cls in KINDS.values() for name in cls.__dataclass_fields__}
    assert not [name for name in names if "text" in name and name != "text"]
    assert not names & {"prompt", "output", "answer", "prompt_token_ids", "token_ids"}
