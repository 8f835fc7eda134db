"""What stores cost where nothing is found: the parts "new" and "answers" of ``tests.benchmarks.kvconnector``.

An engine without a connector and one with each kind of tiers are up at the same time, each in a process of its own, and are
asked in turns of some seconds, in ABBA order, so that what befalls the machine befalls all of them. A turn of each is a pair
of the first engine's and each other's; every pair counts. "new" is prompts with short answers, two batches in a row, since
blocks of one are stored while the next is computed; "answers" is long answers to short prompts, whose blocks are stored
beside the steps that decode. What is left to store after a turn is stored before the next engine's. As a program,
``python -m tests.benchmarks.kvconnector_new JSON`` is one such engine, whose JSON holds the arguments of :func:`answer_turns`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from typing import Any

from tests.benchmarks.kvconnector_engine import NEW_ANSWER, NEW_PROMPTS, NEW_TOKENS, Engine, prompt_of
from tests.benchmarks.results import abba

__all__ = ["ANSWERS", "PROMPTS", "Turns", "new_prompts", "pairs_table"]

READY, SECONDS = "READY", "SECONDS "


@dataclasses.dataclass(frozen=True)
class Turns:
    """What an engine is asked in a turn, and how many turns each one has."""

    tokens: int
    """Of a prompt."""
    answer: int
    """Tokens of an answer."""
    batches: int
    """In a row, of a turn; each of eight prompts."""
    pairs: int
    """Turns of each engine."""
    goal: float
    """Of the first engine's throughput."""

    @property
    def work(self) -> int:
        """Tokens of a turn."""
        return self.batches * NEW_PROMPTS * (self.tokens + self.answer)


PROMPTS = Turns(NEW_TOKENS, NEW_ANSWER, batches=2, pairs=9, goal=0.98)
ANSWERS = Turns(64, 128, batches=1, pairs=11, goal=0.97)


def new_prompts(
    model: str,
    engines: dict[str, dict[str, Any] | None],
    token_bytes: int,
    turns: Turns,
    options: dict[str, Any],
) -> str:
    """Ask all engines in turns and return the table.

    Args:
        model: its folder.
        engines: the connector's configuration of each by name, None without one; the first is what others are compared with.
        token_bytes: bytes of a token's keys and values.
        turns: what they are asked, and how often.
        options: more arguments of ``vllm.LLM``.
    """
    running: dict[str, Asked] = {}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    asked = {"model": model, "token_bytes": token_bytes, "options": options, "turns": dataclasses.asdict(turns)}
    try:
        for name, extra in engines.items():
            running[name] = Asked(extra=extra, **asked)
        for number in range(turns.pairs):
            for name in abba(list(engines), number):
                seconds[name].append(running[name].turn(number))
                print(f"{name}: {seconds[name][-1]:.3f} s", file=sys.stderr, flush=True)
    finally:
        for one in running.values():
            one.stop()
    return pairs_table(seconds, turns)


def pairs_table(seconds: dict[str, list[float]], turns: Turns) -> str:
    """Return rates, and what they are of the first engine's: the pairs' median, mean, its standard error, and every pair."""
    batches = f"{turns.batches} times " if turns.batches > 1 else ""
    what = f"{batches}{NEW_PROMPTS} new prompts of {turns.tokens} tokens, {turns.answer} more each: tokens/s"
    first_name, *_ = seconds
    rows = [f"| tiers | {what} | of {first_name}: median of pairs (goal {turns.goal}) | mean | its standard error |"]
    rows += ["|---" * 5 + "|"]
    pairs = []
    for name, found in seconds.items():
        rate = f"{turns.work / statistics.median(found):.0f}"
        ratios = [first / one for first, one in zip(seconds[first_name], found, strict=True)]
        cells = [f"{statistics.median(ratios):.3f}", f"{statistics.mean(ratios):.3f}", standard_error(ratios)]
        rows.append(f"| {name} | {rate} | {' | '.join(cells if name != first_name else [''] * 3)} |")
        if name != first_name:
            pairs.append(f"Pairs of {name}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}.")
    alone = ", ".join(f"{one:.2f}" for one in seconds[first_name])
    return "\n".join(
        [
            *rows,
            "",
            f"{len(seconds[first_name])} turns of each, every other round backwards. Seconds of {first_name}: {alone}.",
            *pairs,
        ]
    )


def standard_error(ratios: list[float]) -> str:
    """Return that of their mean; of one pair nothing is known."""
    return f"{statistics.stdev(ratios) / len(ratios) ** 0.5:.4f}" if len(ratios) > 1 else "unknown"


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


def answer_turns(
    *, model: str, extra: dict[str, Any] | None, token_bytes: int, turns: dict[str, Any], options: dict[str, Any]
) -> None:
    """Be an engine: for each line of the input, a seed, say the seconds of a turn with prompts that nobody has asked before."""
    asked = Turns(**turns)
    longest = max(2 * NEW_PROMPTS * NEW_TOKENS, NEW_PROMPTS * (asked.tokens + asked.answer))
    engine = Engine(model, extra, longest, token_bytes, engine=options)
    stored = 0.0
    for warm in (-2, -1):
        before = engine.written()
        run_turn(engine, asked, warm)
        engine.settle()
        stored = engine.written() - before
    print(READY, flush=True)
    for line in sys.stdin:
        before = engine.written()
        seconds = run_turn(engine, asked, int(line))
        if extra is not None:  # else there is nothing to store
            engine.settle(before + stored)
        print(f"{SECONDS}{seconds}", flush=True)


def run_turn(engine: Engine, turns: Turns, seed: int) -> float:
    """Return the seconds of all batches."""
    begin = 1_000_000 * turns.tokens  # a tier may still hold what another part has asked
    firsts = [begin + ((seed + 2) * turns.batches + batch) * NEW_PROMPTS for batch in range(turns.batches)]
    batches = [[prompt_of(turns.tokens, first + number) for number in range(NEW_PROMPTS)] for first in firsts]
    return sum(engine.ask(batch, turns.answer)[0] for batch in batches)


if __name__ == "__main__":
    answer_turns(**json.loads(sys.argv[1]))
