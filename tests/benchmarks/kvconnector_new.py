"""What prompts that hit nothing cost: the part "new" of ``tests.benchmarks.kvconnector``.

An engine without a connector and one with each kind of tiers are up at the same time, each in a process of its own, and are
asked in turns, so that what befalls the machine befalls all of them. A turn is several batches in a row, since blocks of one
are stored while the next is computed; what is left to store then is stored before the next engine's turn. As a program,
``python -m tests.benchmarks.kvconnector_new JSON`` is one such engine, whose JSON holds the arguments of :func:`answer_turns`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from tests.benchmarks.kvconnector_engine import NEW_ANSWER, NEW_PROMPTS, NEW_TOKENS, Engine, prompt_of
from tests.benchmarks.results import abba

__all__ = ["BATCHES", "new_prompts"]

BATCHES = 3  # of a turn
GOAL = 0.98
READY, SECONDS = "READY", "SECONDS "


def new_prompts(
    model: str,
    engines: dict[str, dict[str, Any] | None],
    token_bytes: int,
    turns: int,
    options: dict[str, Any],
) -> str:
    """Ask all engines in turns and return the table.

    Args:
        model: its folder.
        engines: the connector's configuration of each by name, None without one; the first is what others are compared with.
        token_bytes: bytes of a token's keys and values.
        turns: of each engine.
        options: more arguments of ``vllm.LLM``.
    """
    running: dict[str, Asked] = {}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for name, extra in engines.items():
            running[name] = Asked(model=model, extra=extra, token_bytes=token_bytes, options=options)
        for number in range(turns):
            for name in abba(list(engines), number):
                seconds[name].append(running[name].turn(number))
                print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    finally:
        for one in running.values():
            one.stop()
    return table(seconds)


def table(seconds: dict[str, list[float]]) -> str:
    """Return rates, and how much that is of the first engine's: the median of the ratios of turns, with the least and the most."""
    work = BATCHES * NEW_PROMPTS * (NEW_TOKENS + NEW_ANSWER)
    what = f"{BATCHES} times {NEW_PROMPTS} new prompts of {NEW_TOKENS} tokens, {NEW_ANSWER} more each: tokens/s"
    first = next(iter(seconds.values()))
    rows = [f"| tiers | {what} | of none in the same turn (goal {GOAL}) |", "|---|---|---|"]
    for name, found in seconds.items():
        ratios = [none / one for none, one in zip(first, found, strict=True)]
        share = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rows.append(f"| {name} | {work / statistics.median(found):.0f} | {share} |")
    return "\n".join([*rows, "", f"{len(first)} turns of each, in ABBA order."])


class Asked:
    """An engine in a process of its own, which waits for its turns."""

    def __init__(self, **asked: Any) -> None:
        """Start it and wait until it is up."""
        command = [sys.executable, "-m", "tests.benchmarks.kvconnector_new", json.dumps(asked)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer(READY)

    def turn(self, seed: int) -> float:
        """Return the seconds of a turn."""
        assert self._process.stdin is not None
        print(seed, file=self._process.stdin, flush=True)
        return float(self._answer(SECONDS))

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self, beginning: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line.removeprefix(beginning)
        msg = f"an engine ended with status {self._process.wait()}; what it said is above"
        raise RuntimeError(msg)


def answer_turns(*, model: str, extra: dict[str, Any] | None, token_bytes: int, options: dict[str, Any]) -> None:
    """Be an engine: for each line of the input, a seed, say the seconds of a turn with prompts that nobody has asked before."""
    engine = Engine(model, extra, 2 * NEW_PROMPTS * NEW_TOKENS, token_bytes, engine=options)
    run_turn(engine, -1)  # warm
    print(READY, flush=True)
    for line in sys.stdin:
        print(f"{SECONDS}{run_turn(engine, int(line))}", flush=True)


def run_turn(engine: Engine, seed: int) -> float:
    """Return the seconds of all batches; what they leave to store is stored after that."""
    firsts = [((seed + 1) * BATCHES + batch) * NEW_PROMPTS for batch in range(BATCHES)]
    batches = [[prompt_of(NEW_TOKENS, first + number) for number in range(NEW_PROMPTS)] for first in firsts]
    seconds = sum(engine.ask(batch, NEW_ANSWER)[0] for batch in batches)
    engine.settle()
    return seconds


if __name__ == "__main__":
    answer_turns(**json.loads(sys.argv[1]))
