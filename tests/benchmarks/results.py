"""The records of benchmarks as JSON: what must be in one, and the medians and spreads that tables and plots show."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
# What every record of the engines holds, and every turn in it.
RECORD = {
    "suite": str,
    "schema": int,
    "machine": dict,
    "shape": str,
    "cases": str,
    "contestants": dict,
    "failures": dict,
    "turns": list,
}
TURN = {
    "round": int,
    "contestant": str,
    "load": float,
    "limits": dict,
    "caches": str,
    "first_token_s": float,
    "versions": dict,
    "seconds": dict,
    "memory_gib": float,
}
MACHINE = {"name": str, "processor": str, "cores": int, "extensions": list, "date": str, "commit": str}


@dataclass(frozen=True)
class Spread:
    """A figure over rounds; each round counts with the median of its samples."""

    median: float
    least: float
    most: float
    rounds: int

    def times(self, factor: float) -> Spread:
        """Return it in another unit."""
        return Spread(self.median * factor, self.least * factor, self.most * factor, self.rounds)

    def rate(self, amount: float) -> Spread:
        """Return so much a second of what this says in seconds."""
        return Spread(amount / self.median, amount / self.most, amount / self.least, self.rounds)


def abba(turns: list[Any], number: int) -> list[Any]:
    """Return the order of a round: every other one runs backwards, so that a drift of the machine favours nobody."""
    return turns if number % 2 == 0 else turns[::-1]


def spread(rounds: list[list[float]]) -> Spread:
    """Return the median, least and most of the rounds' medians."""
    medians = [statistics.median(samples) for samples in rounds]
    return Spread(statistics.median(medians), min(medians), max(medians), len(medians))


def seconds(record: dict[str, Any], contestant: str, case: str) -> Spread | None:
    """Return a contestant's figure for a case in seconds; None where it has none."""
    rounds = [turn["seconds"][case] for turn in turns_of(record, contestant) if case in turn["seconds"]]
    return spread(rounds) if rounds else None


def turns_of(record: dict[str, Any], contestant: str) -> list[dict[str, Any]]:
    """Return a contestant's turns."""
    return [turn for turn in record["turns"] if turn["contestant"] == contestant]


def write(file: Path, record: dict[str, Any]) -> None:
    """Write a record that is whole; a line a turn, so that a later run shows what it changed."""
    check(record)
    file.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.5g}"))
    turns = rounded.pop("turns")
    head = json.dumps(rounded, indent=1).removesuffix("\n}")
    file.write_text(f'{head},\n "turns": [\n' + ",\n".join(f"  {json.dumps(turn)}" for turn in turns) + "\n ]\n}\n")


def read(file: Path) -> dict[str, Any]:
    """Return a record; ValueError when it is not one of this schema."""
    record = json.loads(file.read_text())
    check(record)
    return record


def check(record: dict[str, Any]) -> None:
    """Raise ValueError unless the record has every field, and every turn figures of a contestant that is described."""
    demand("record", record, RECORD)
    if record["schema"] != SCHEMA:
        msg = f"a record of schema {record['schema']} cannot be read as schema {SCHEMA}: measure again."
        raise ValueError(msg)
    demand("machine", record["machine"], MACHINE)
    for turn in record["turns"]:
        demand("turn", turn, TURN)
        if turn["contestant"] not in record["contestants"]:
            msg = f"a turn of {turn['contestant']!r}, which the record does not describe: {sorted(record['contestants'])}."
            raise ValueError(msg)
        for case, samples in turn["seconds"].items():
            if not samples or min(samples) <= 0:
                msg = f"{turn['contestant']} has {samples} as seconds of {case}: at least one, all above 0."
                raise ValueError(msg)


def demand(what: str, found: dict[str, Any], fields: dict[str, type]) -> None:
    """Raise ValueError unless all fields are there and of their types."""
    for name, kind in fields.items():
        fits = isinstance(found.get(name), (kind, int) if kind is float else kind)
        if not fits:
            msg = f"a {what}'s {name} must be of type {kind.__name__}, got {found.get(name)!r}: measure again."
            raise ValueError(msg)
