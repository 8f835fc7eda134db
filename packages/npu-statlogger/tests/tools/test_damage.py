"""Lines that no logger writes: every command leaves them out and goes on, whatever stands in them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from npu_statlogger.cli import main
from npu_statlogger.lines import Note, Run
from npu_statlogger.tools.source import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ODD = (
    "1.5",
    "1e300",
    "1e15",
    "-1e300",
    "1e999",
    "-Infinity",
    "NaN",
    "9" * 400,
    "-1",
    "null",
    "[]",
    '["x"]',
    "[1]",
    '"x"',
    "true",
)
"""What stands in place of a value."""

COMMANDS = (
    "summary", "summary --json", "report", "report --json", "report --html OUT", "tail", "tail -n 9 --kind request --json",
    "merge --every 0", "merge", "slo --ttft 1s --tpot 1s --e2e 1s", "diff FILE", "diff FILE --json", "top --once", "doctor",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value within JSON-ready data."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in entries:
        yield from places(each, (*path, key))


def replaced(data: dict[str, Any], path: tuple[Any, ...], odd: str) -> str:
    """Return JSON of `data` with `odd` in one place."""
    again = json.loads(json.dumps(data))
    part = again
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = "ODD"
    return json.dumps(again).replace('"ODD"', odd, 1)


@pytest.fixture
def lines(make_load: type, request_line: Callable) -> list[dict[str, Any]]:
    """One line of each kind, whose distributions hold a few values."""
    (interval, *_) = make_load(lines=1, requests=2).snapshots()
    interval.gauges["0"]["kv_cache_usage_perc"] = (interval.end, 0.25)
    interval.totals_nano["kv_offload_load_time"] = 5
    interval.distributions = {"time_to_first_token_seconds": interval.distributions["time_to_first_token_seconds"]}
    common = {"time": interval.start, "process": "host:1"}
    run = Run(**common, model="m", versions={"vllm": "1"}, engines=[0], settings={"interval": 10.0, "odd": [1.5]})
    note = Note(**common, name="clock_jumped", text="", values={"seconds": 3.0})
    return [line.to_dict() for line in (interval, request_line(), run, note)]


def test_no_command_stumbles_over_a_value_that_is_odd(
    lines: list[dict[str, Any]], write_run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, path = write_run(lines=3).read_bytes(), tmp_path / "odd.jsonl"
    texts = [replaced(line, place, odd) for line in lines for place in places(line) for odd in ODD]
    assert len(texts) > 1000
    (tmp_path / "all.jsonl").write_bytes(whole + "\n".join(texts).encode() + b"\n" + whole)
    readable = list(Reading([tmp_path / "all.jsonl"]))
    for line in readable:
        json.dumps(line.to_dict(), allow_nan=False)
    capsys.readouterr()
    for command in COMMANDS:
        for text in ["\n".join(texts), *texts[::97]]:
            path.write_bytes(whole + text.encode() + b"\n")
            name, *options = command.replace("OUT", str(tmp_path / "out")).replace("FILE", str(path)).split()
            assert main([name, str(path), *options]) in (0, 2, 3), (command, text)
            capsys.readouterr()


NUMBERS = (
    (0, "start"), (0, "end"), (0, "counters", "generation_tokens"), (0, "totals_nano", "kv_offload_load_time"),
    (0, "gauges", "0", "kv_cache_usage_perc", 1), (0, "distributions", "time_to_first_token_seconds", "sum_nano"),
    (1, "time"), (1, "arrival"), (1, "e2e_seconds"), (2, "settings", "odd", 0), (3, "values", "seconds"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("odd", "place"),
    [
        *((odd, place) for odd in ("1e300", "1e999", "NaN", "-Infinity", "9" * 400) for place in NUMBERS),
        *(("1e15", place) for place in NUMBERS if place[1] in ("start", "end", "time", "arrival")),
        *(("[1]", (0, name)) for name in ("processes", "models")),
        *(("[]", (kind, "kind")) for kind in (0, 1)),
    ],
)
def test_such_a_line_is_counted_as_damaged(
    odd: str, place: tuple[Any, ...], lines: list[dict[str, Any]], write_run: Callable
) -> None:
    path, (line, *where) = write_run(lines=2), place
    with path.open("a") as file:
        file.write(replaced(lines[line], tuple(where), odd) + "\n")
    reading = Reading([path])
    assert len(list(reading)) == 2
    assert reading.left_out == {"damaged": 1}
