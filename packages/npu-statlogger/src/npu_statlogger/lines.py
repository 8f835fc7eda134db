"""The other kinds of lines: of a request, of a step, of the process that writes, and of what a reader should know.

Each is a dataclass whose fields are the keys of the line. None of them holds a prompt or an answer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from npu_statlogger.errors import FormatError
from npu_statlogger.snapshot import SCHEMA, SCHEMA_1, Snapshot

__all__ = ["KINDS", "Line", "Note", "RequestLine", "Run", "StepLine", "parse"]


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
            FormatError: a key is missing, or of the wrong type.
        """
        known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        try:
            line = cls(**known)
        except TypeError as error:
            msg = f"not a line of kind {cls.kind!r}: {error}."
            raise FormatError(msg) from error
        for name, value in known.items():
            if not isinstance(value, _TYPES[cls.__dataclass_fields__[name].type.partition("[")[0]]):
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


def parse(data: object) -> Line:
    """Return the line that decoded JSON stands for.

    Raises:
        FormatError: it is none of this package's, or a part is missing or malformed.
    """
    if isinstance(data, dict) and data.get("schema") in (SCHEMA, SCHEMA_1) and data.get("kind") in KINDS:
        return KINDS[data["kind"]].from_dict(data)
    return Snapshot.from_dict(data)
