"""Engines that are up at once and take their turns case by case: ``tests.benchmarks.engine --together``.

What a machine's memory gives can change within minutes by more than two engines differ (50 and 85 GB/s were seen on a virtual
machine), so that whoever has the better minutes wins. Here each case is asked of all contestants one right after the other,
and again in reversed order, which takes seconds. It needs the memory for all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.engine_cases import ONE_STEP, Case
from tests.benchmarks.results import abba

SETTLES = 1.5
"""Seconds before a turn. vLLM's workers look for the next message for a second after the last (``shm_broadcast.SpinCondition``), with
all of a core, which is no fault of who is asked next."""


def round_of(
    commands: dict[str, list[str]],
    environs: dict[str, dict[str, str]],
    cases: list[Case],
    folder: Path,
    turns: int = 1,
    memory: Callable[[], float] | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Start all contestants, ask each case of all, twice a turn, and stop them.

    Args:
        commands: of each contestant by name, all but the word that makes it wait for cases.
        environs: its variables.
        cases: what to ask; contexts that are computed come first, since an engine that fills them takes the other's place.
        folder: for a file NAME.log of each, with all that it prints.
        turns: of a case; more of them see more of the machine's moods than more samples do.
        memory: what the machine reads from memory at the moment, GB/s; asked before and after our steps of a single request.

    Returns:
        What each has measured by name, and what those said that failed.
    """
    found: dict[str, dict[str, Any]] = {}
    takes: dict[str, list[str]] = {}
    failures: dict[str, str] = {}
    running: dict[str, Asked] = {}
    try:
        for name, command in commands.items():
            try:
                running[name] = Asked(name, [*started_now(command), "asked"], environs[name], folder / f"{name}.log")
                found[name] = running[name].first | {"seconds": {}, "memory_gib": 0.0}
                takes[name] = found[name].pop("takes")
            except RuntimeError as error:
                failures[name] = str(error)
        for number, case in enumerate(sorted(cases, key=lambda case: case.filled)):
            for name in [name for turn in range(2 * turns) for name in abba(list(found), number + turn)]:
                if name in failures or case.name not in takes[name]:
                    continue
                time.sleep(SETTLES)
                beside = memory if name == "npu" and case.name == ONE_STEP else None
                try:
                    read = [beside()] if beside else []
                    add(found[name], running[name].measured(case.name))
                    if beside:
                        found[name].setdefault("memory_beside", []).extend([*read, beside()])
                except RuntimeError as error:
                    failures[name] = str(error)
    finally:
        for one in running.values():
            one.stop()
    return {name: one for name, one in found.items() if name not in failures}, failures


def started_now(command: list[str]) -> list[str]:
    """Return a contestant's command with the moment at which it is started, this one."""
    return [str(time.time()) if part == "{now}" else part for part in command]


def add(found: dict[str, Any], measured: dict[str, Any]) -> None:
    """Add the samples of a case, in seconds, and the memory to what a contestant has measured."""
    for case, samples in measured["seconds"].items():
        found["seconds"].setdefault(case, []).extend(samples)
    found["memory_gib"] = measured["memory_gib"]


class Asked:
    """A contestant in a process of its own that waits for the names of cases."""

    def __init__(self, name: str, command: list[str], environ: dict[str, str], log: Path) -> None:
        """Start it and wait until it is up; RuntimeError with the end of what it printed if it does not come up."""
        self.name, self.log = name, log
        log.unlink(missing_ok=True)
        with log.open("a") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | environ,
                cwd=Path(__file__).parents[2],
            )
        try:
            self.first = self.answer()
        except RuntimeError:
            self.stop()
            raise

    def measured(self, case: str) -> dict[str, Any]:
        """Return the seconds of a case's samples and the peak memory."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, and says why below
            print(case, file=self.process.stdin, flush=True)
        measured = self.answer()
        (samples,) = measured["seconds"].values()
        print(f"{case}: {self.name} {sorted(samples)[len(samples) // 2] * 1e3:.1f} ms", file=sys.stderr, flush=True)
        return measured

    def answer(self) -> dict[str, Any]:
        """Return what its next line of results says."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
            with self.log.open("a") as file:
                file.write(line)
        said = self.log.read_text(errors="replace")
        msg = f"{self.name} gave no result (exit code {self.process.wait()}):\n{said[-4000:]}"
        raise RuntimeError(msg)

    def stop(self) -> None:
        """End it as a process that is asked nothing more ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
