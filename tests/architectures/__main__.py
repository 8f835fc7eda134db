"""Runs the architectures that vLLM registers and transformers has code for, each in a process, and writes the table.

    python -m tests.architectures [--only WORDS] [--workers N] [--page FILE]

Ends with 1 where an outcome is not the one that reasons.toml has, which is "works" for all that it does not name. The
table goes to FILE, between its two marks, where all of them ran.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, Queue

from tests.architectures import page
from tests.architectures.one import ANSWERS, ERROR, NOT_MADE, OUTCOME, Outcome
from tests.architectures.reasons import NO_CODE, unexpected
from tests.architectures.registry import has_code, registered
from tests.support.forks import ForkServer
from tests.support.vllm_process import IMPORTS, PASSIVE

PROGRAM = "from tests.architectures.one import {0}; import sys; {0}(*sys.argv[1:])"
LONGEST = 120  # seconds of one architecture


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("--only", default="", help="run those whose name holds one of these words")
    parser.add_argument("--kind", default="", help="run those of this kind")
    parser.add_argument("--workers", type=int, default=2, help="how many at a time")
    parser.add_argument("--page", type=Path, help="file to write the table into")
    parser.add_argument("--logs", type=Path, help="folder for what the processes write")
    arguments = parser.parse_args()
    words = arguments.only.split() or [""]
    chosen = {
        name: kind
        for name, kind in registered().items()
        if any(word in name for word in words) and arguments.kind in kind
    }
    asked: Queue[tuple[str, str]] = Queue()
    for name, kind in chosen.items():
        if has_code(name):
            asked.put((name, kind))
    done = list(_run_all(asked, arguments.workers, arguments.logs))
    done += [Outcome(name, kind, NOT_MADE, NO_CODE) for name, kind in chosen.items() if not has_code(name)]
    wrong = list(unexpected(done))
    for line in wrong:
        print(f"UNEXPECTED: {line}", flush=True)
    if arguments.page and len(chosen) == len(registered()):
        page.write(arguments.page, done)
    return 1 if wrong else 0


def _run_all(asked: Queue[tuple[str, str]], workers: int, logs: Path | None) -> Iterable[Outcome]:
    """Run all that is asked, a few at a time, and return the outcomes."""
    found: list[Outcome] = []
    threads = [threading.Thread(target=_work, args=(asked, found, logs)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _work(asked: Queue[tuple[str, str]], found: list[Outcome], logs: Path | None) -> None:
    server = ForkServer(*IMPORTS, environ=os.environ | PASSIVE)
    for _ in itertools.count():
        try:
            architecture, kind = asked.get_nowait()
        except Empty:
            return
        begin = time.monotonic()
        outcome, log = _run(server, architecture, kind)
        found.append(outcome)
        print(f"{time.monotonic() - begin:5.1f} s  {architecture}: {outcome.outcome}, {outcome.said}", flush=True)
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{architecture}.log").write_text(log)


def _run(server: ForkServer, architecture: str, kind: str) -> tuple[Outcome, str]:
    """Run one in a fork; a process that dies or hangs is an outcome too."""
    environ = os.environ | PASSIVE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "2GiB"}
    log = ""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("serve", "judge"):
            try:
                asked = (PROGRAM.format(part), architecture, kind, folder)
                done = server.run(*asked, environ=environ, timeout=LONGEST)
            except subprocess.TimeoutExpired:
                return Outcome(architecture, kind, ERROR, f"had not ended after {LONGEST} s"), log
            log += done.stdout + done.stderr
            result = Path(folder) / OUTCOME
            if result.exists():
                return Outcome(**json.loads(result.read_text())), log
            if not (Path(folder) / ANSWERS).exists():
                break
        return Outcome(architecture, kind, ERROR, f"its process ended with {done.returncode}"), log


if __name__ == "__main__":
    sys.exit(main())
