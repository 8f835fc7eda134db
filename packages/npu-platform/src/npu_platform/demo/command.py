"""``npu demo``: serve the demo model with vLLM on npu, ask it over HTTP, check the answers, stop the server."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from npu_platform import activation
from npu_platform.demo import MODEL
from npu_platform.demo.facts import CAPITALS, Fact, all_facts, count, sum_of
from npu_platform.demo.server import Server, ServerError

__all__ = ["Report", "questions", "run", "server_arguments"]

_SPEED_TOKENS = 256


@dataclass
class Report:
    """What one run of the demo saw; printed as text or as JSON."""

    right: bool = False
    answers: list[dict[str, Any]] = field(default_factory=list)
    tokens_per_second: float = 0.0
    startup_seconds: float = 0.0
    ran: dict[str, str] = field(default_factory=dict)
    stopped_cleanly: bool = False
    log: str = ""
    problem: str | None = None


def run(*, as_json: bool, ready_timeout: float) -> int:
    """Run the demo and print what it saw; return 0 only if every answer was right and the server stopped cleanly."""
    report = Report()
    say = (lambda *_: None) if as_json else print
    decision = activation.decide()
    if decision.activate:
        _serve(report, say, ready_timeout)
    else:
        report.problem = f"{decision.reason} {decision.remedy or ''} (`npu doctor` shows every step.)"
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    elif report.problem:
        print(report.problem, file=sys.stderr)
    return 0 if report.right and report.stopped_cleanly else 1


def questions() -> list[Fact]:
    """Return what the demo asks: one question of each kind."""
    json_fact = next(fact for fact in all_facts() if fact.topic == "json" and "Japan" in fact.question)
    capital = f"The capital of Iceland is {CAPITALS['Iceland']}."
    return [Fact("capital", "What is the capital of Iceland?", capital), sum_of(7, 5), count(4, 19), json_fact]


def server_arguments() -> list[str]:
    """Return the arguments of ``vllm serve`` that suit a model of a few MB: little memory, few requests at once."""
    return ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)]


def _serve(report: Report, say: Any, ready_timeout: float) -> None:
    log = Path(tempfile.mkdtemp(prefix="npu-demo-")) / "server.log"
    report.log = str(log)
    server = Server(MODEL, *server_arguments(), log=log)
    try:
        with server:
            say(f"Starting vllm serve on {server.url} (log: {server.log})")
            report.startup_seconds = server.wait_until_ready(ready_timeout)
            say(f"Ready after {report.startup_seconds:.1f} s")
            _ask(server, report, say)
            report.tokens_per_second = _tokens_per_second(server)
            say(f"{report.tokens_per_second:.0f} tokens/s for one request of {_SPEED_TOKENS} tokens")
            report.ran = what_ran_where(server.log.read_text(errors="replace"))
            say("Ran on " + ", ".join(f"{name} {value}" for name, value in report.ran.items()))
            report.stopped_cleanly = server.stop()
            say("Server stopped" if report.stopped_cleanly else "The server had to be killed")
    except ServerError as error:
        report.right = False
        report.problem = str(error)


def _ask(server: Server, report: Report, say: Any) -> None:
    for fact in questions():
        message = {"role": "user", "content": fact.question}
        answer = server.ask("/v1/chat/completions", messages=[message], temperature=0, max_tokens=128)
        text = answer["choices"][0]["message"]["content"]
        right = text == fact.answer
        report.answers.append({"question": fact.question, "answer": text, "right": right})
        say(f"  {fact.question}\n    {text}" + ("" if right else f"  <- wrong, it was taught: {fact.answer}"))
    report.right = all(answer["right"] for answer in report.answers)


def _tokens_per_second(server: Server) -> float:
    """Return the decode rate of one request: tokens after the first, over the time they took."""
    body: dict[str, Any] = {"prompt": "1 2 3", "max_tokens": _SPEED_TOKENS, "ignore_eos": True, "temperature": 0}
    times = [time.monotonic() for _ in server.stream("/v1/completions", **body)]
    return (_SPEED_TOKENS - 1) / (times[-1] - times[0])


def what_ran_where(log: str) -> dict[str, str]:
    """Return what the worker's summary line says of device, dtype, ops and graphs."""
    marker = "npu worker: "
    for line in log.splitlines():
        if marker in line:
            return dict(part.split("=", 1) for part in line.split(marker, 1)[1].strip().split("; "))
    return {}
