"""What a tier that misbehaves costs: the part "bad" of ``tests.benchmarks.kvconnector``.

Half of the prompts were stored before in a tier that then begins to fail, to be slow or to be silent (the guard has its own
deadlines), or in a Valkey that then is stopped; the others are new. Beside that an engine without a connector, which computes all of them, and one whose tier
goes on as it should. In turns, each engine in a process of its own.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.benchmarks.kvconnector_engine import MIXED, NEW_ANSWER, NEW_TOKENS, in_a_process
from tests.benchmarks.results import abba
from tests.support.stores import ValkeyServer

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BEHAVIOURS", "first_word", "misbehaving"]

BEHAVIOURS: dict[str, dict[str, Any] | None] = {
    "no connector": None,
    "a tier as it should be": {},
    "slow: a load and a store take 2 s, an answer 0.5 s": {"slow": 2.0, "slow_lookup": 0.5},
    "failing: all loads and stores, every fifth question": {"bad_load": 1, "bad_store": 1, "bad_lookup": 5},
    "silent: no answer to any question, load or store": {
        "asks": True,
        "silent_lookup": 1,
        "late_load": 1,
        "late_store": 1,
    },
    "stopped: the remote tier, its Valkey stopped by SIGSTOP": {"type": "remote"},
}
GOAL = 0.97


def misbehaving(folder: Path, model: Path, token_bytes: int, rounds: int, kinds: list[str]) -> str:
    """Measure behaviours and return the table.

    Args:
        folder: for what is made.
        model: its folder.
        token_bytes: bytes of a token's keys and values.
        rounds: engines of each kind.
        kinds: first words of the behaviours beside no connector.
    """
    names = [name for name in BEHAVIOURS if first_word(name) in {"no", *kinds}]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in abba(names, number):
            began = time.monotonic()
            switch = folder / f"switch-{number}-{names.index(name)}"
            seconds[name] += one_engine(model, token_bytes, BEHAVIOURS[name], switch, seed=number)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    work = 2 * MIXED * (NEW_TOKENS + NEW_ANSWER)
    alone = statistics.median(seconds["no connector"])
    about = f"{MIXED} prompts of {NEW_TOKENS} tokens that come back and {MIXED} new ones, {NEW_ANSWER} more each"
    rows = [f"| tier | {about}: tokens/s | of none (goal {GOAL}) |", "|---|---|---|"]
    for name, found in seconds.items():
        median = statistics.median(found)
        rows.append(f"| {name} | {work / median:.0f} | {alone / median:.3f} |")
    return "\n".join(rows)


def first_word(behaviour: str) -> str:
    """Return what a behaviour is asked for by: slow, failing, silent, or a."""
    return behaviour.split(maxsplit=1)[0].removesuffix(":")


def one_engine(
    model: Path, token_bytes: int, behaviour: dict[str, Any] | None, switch: Path, *, seed: int
) -> list[float]:
    """Return the seconds of one engine."""
    tokens = 2 * MIXED * (NEW_TOKENS + NEW_ANSWER)
    extra, store = None, None
    if behaviour is not None:
        tier = {"type": "FlakyTier", "module_path": "tests.support.flaky_tier", "switch": str(switch), **behaviour}
        if behaviour.get("type") == "remote":
            store = Stopped(switch)
            tier = {**behaviour, "url": store.url, "pending_bytes": tokens * token_bytes}
        extra = {"cpu_bytes_to_use": tokens * token_bytes, "secondary_tiers": [tier]}
    found = in_a_process(
        model=str(model),
        extra=extra,
        lengths=[],
        longest=NEW_TOKENS + NEW_ANSWER,
        block_bytes=token_bytes,
        seed=seed,
        parts=["mixed"],
        switch=str(switch),
    )
    if store is not None:
        store.kill()
    return found["mixed"]


class Stopped(ValkeyServer):
    """A Valkey that is stopped as soon as there is a file."""

    def __init__(self, switch: Path) -> None:
        """Start it."""
        super().__init__(switch.parent)
        self.start()
        threading.Thread(target=self._watch, args=(switch,), daemon=True).start()

    def _watch(self, switch: Path) -> None:
        while not switch.exists():
            time.sleep(0.001)
        self.stall()
