"""The other kinds of lines: of a request, of a step, of the process that writes, and of what a reader should know.

Each is a dataclass whose fields are the keys of the line. None of them holds a prompt or an answer.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, ClassVar, Self, cast

from npu_statlogger.errors import FormatError
from npu_statlogger.sketch import is_bounded
from npu_statlogger.snapshot import SCHEMA, SCHEMA_1, Snapshot

__all__ = ["KINDS", "Line", "Note", "RequestLine", "Run", "StepLine", "decode", "parse"]

_DEPTH = 4
"""Dictionaries and lists in one another that a line holds at most."""

_TIMES = ("start", "end", "time", "arrival")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "float": (int, float), "dict": dict, "list": list,
}  # fmt: skip


@dataclass(kw_only=True)
class _Line:
    kind: ClassVar[str]

    time: float
    """When it happened, seconds since the epoch: of a request, when it finished."""

    process: str
    """host:pid of the writer."""

    def to_dict(self) -> dict[str, Any]:
        """Return the line as JSON-ready data."""
        return {"schema": SCHEMA, "kind": self.kind, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Rebuild a line; keys of a later version are left out.

        Raises:
            FormatError: a key is missing, of the wrong type, or a number beyond all bounds.
        """
        known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        try:
            line = cls(**known)
        except TypeError as error:
            msg = f"not a line of kind {cls.kind!r}: {error}."
            raise FormatError(msg) from error
        for name, value in known.items():
            fits = isinstance(value, _TYPES[cls.__dataclass_fields__[name].type.partition("[")[0]])
            if not (fits and _is_plain(value)):
                msg = f"not a line of kind {cls.kind!r}: {name} is {value!r}."
                raise FormatError(msg)
        return line


@dataclass(kw_only=True)
class RequestLine(_Line):
    """One finished request, kept by sampling; the sum of the weights estimates the number of all."""

    kind: ClassVar[str] = "request"

    model: str
    """As served."""

    engine: int
    """Data-parallel index."""

    request_id: str
    """By the setting `request_ids`: a hash (16 hexadecimal digits), as the client sent it, or "" for none."""

    arrival: float
    """Seconds since the epoch, on the front end's clock."""

    finish_reason: str
    """stop, length, abort, error or repetition."""

    e2e_seconds: float
    """From arrival to the last token, the front end's share too."""

    queue_seconds: float
    """From being queued to the first step."""

    prefill_seconds: float
    """From the first step to the first token."""

    decode_seconds: float
    """From the first token to the last."""

    inference_seconds: float
    """From the first step to the last token."""

    first_token_seconds: float
    """queue_seconds + prefill_seconds: without the front end's share, which vLLM does not give per request."""

    time_per_output_token_seconds: float
    """0 for a request of one token."""

    prompt_tokens: int
    """All of them, cached or not."""

    cached_tokens: int
    """Prompt tokens that a cache had."""

    generation_tokens: int
    """Tokens generated."""

    max_tokens: int
    """What the client asked for, 0 for no limit of its own."""

    preemptions: int
    """Times that it was set aside for want of cache blocks."""

    corrupted: int
    """1 if its logits had a NaN."""

    weight: float
    """How many requests this line stands for."""


@dataclass(kw_only=True)
class StepLine(_Line):
    """One step of an engine, as this process saw it."""

    kind: ClassVar[str] = "step"

    engine: int
    """Data-parallel index."""

    seconds: float
    """Since this engine's step before, 0 for the first."""

    running: int
    """Requests in the step."""

    waiting: int
    """With the deferred ones."""

    deferred: int
    """Those that cannot be scheduled yet, such as while a KV connector loads."""

    kv_cache_usage: float
    """Fraction, 0 to 1."""

    prompt_tokens: int
    """Computed in this step; what a cache had is in cached_tokens."""

    cached_tokens: int
    """Prompt tokens that a cache had."""

    generation_tokens: int
    """Tokens generated."""

    first_tokens: int
    """Requests that got their first token."""

    finished: int
    """Requests that ended."""

    preemptions: int
    """Requests set aside."""

    draft_tokens: int
    """Tokens drafted."""

    accepted_tokens: int
    """Drafted tokens accepted."""

    weight: float
    """1 / the fraction of steps that have a line."""


@dataclass(kw_only=True)
class Run(_Line):
    """Who writes: one line at the head of each file and process."""

    kind: ClassVar[str] = "run"

    model: str
    """As served."""

    versions: dict[str, str]
    """npu_statlogger and vllm."""

    engines: list[int]
    """Those whose records this process gets."""

    settings: dict[str, Any]
    """This package's settings, and those of vLLM that size an engine."""


@dataclass(kw_only=True)
class Note(_Line):
    """Something that a reader of the figures should know, such as a clock that was set."""

    kind: ClassVar[str] = "note"

    name: str
    """What happened, for programs: clock_jumped."""

    text: str
    """The same, for people."""

    values: dict[str, float] = field(default_factory=dict)
    """Its numbers by name."""


Line = Snapshot | RequestLine | StepLine | Run | Note
KINDS: dict[str, type[RequestLine | StepLine | Run | Note]] = {
    cls.kind: cls for cls in (RequestLine, StepLine, Run, Note)
}


def decode(text: bytes) -> Line:
    """Return the line that a text stands for.

    Raises:
        FormatError: it is no JSON, or `parse` refuses it.
    """
    try:
        data = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        msg = f"not JSON: {error}."
        raise FormatError(msg) from error
    return parse(data)


def parse(data: object) -> Line:
    """Return the line that decoded JSON stands for.

    Raises:
        FormatError: it is none of this package's, a part is missing or malformed, or a number is beyond all bounds.
    """
    kind = data.get("kind") if isinstance(data, dict) and data.get("schema") in (SCHEMA, SCHEMA_1) else None
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    line: Line = Snapshot.from_dict(data) if cls is None else cls.from_dict(cast("dict[str, Any]", data))
    for name in _TIMES:
        _check_time(name, getattr(line, name, 0.0))
    return line


def _refuse(constant: str) -> None:
    msg = f"it holds {constant}"
    raise ValueError(msg)


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Tell whether a value, or all that it holds, can be shown, added up and written again."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)
    return not isinstance(value, int | float) or is_bounded(value)


def _check_time(name: str, value: float) -> None:
    try:
        datetime.fromtimestamp(value, UTC)
    except (OverflowError, ValueError, OSError) as error:
        msg = f"{name} is {value!r}, which no calendar has."
        raise FormatError(msg) from error
