"""``npu warm``: compiles a model's Triton kernels before it is served: starts the server, asks it once, stops it.

The server is vLLM's own, with random weights: what it compiles is what one with real weights would, and nothing else
has to be known of the model. Where the kernels lie in Triton's cache already, nothing is compiled.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from npu_platform import activation, config
from npu_platform.demo.server import Server, ServerError
from npu_platform.triton import availability, build

__all__ = ["Report", "requests", "run"]

_LENGTHS = (1, 20, 5, 200)  # of prompts: 1 is a number that kernels are compiled for


@dataclass
class Report:
    """What one run of the command saw; printed as text or as JSON."""

    compiled: list[str] = field(default_factory=list)
    """Names of the kernels that were compiled, in their order; a name comes again for other types or constants."""
    compiled_for_requests: int = 0
    """How many of them only the requests needed, after the server was ready."""
    refused: dict[str, str] = field(default_factory=dict)
    """Kinds of requests that this server does not answer, with what it said."""
    in_cache: int = 0
    cache: str = ""
    seconds: float = 0.0
    log: str = ""
    problem: str | None = None


def run(*, as_json: bool, served: Sequence[str], ready_timeout: float) -> int:
    """Fill the cache for ``vllm serve`` with these arguments and print what was done; return 0 if all went well."""
    report = Report()
    say: Callable[[str], object] = (lambda _: None) if as_json else _say
    report.problem = _problem()
    if report.problem is None:
        began = time.monotonic()
        _serve(report, say, served, ready_timeout)
        report.seconds = round(time.monotonic() - began, 1)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    elif report.problem:
        print(report.problem, file=sys.stderr)
    else:
        _say(f"{len(report.compiled)} kernels compiled, {report.in_cache} in {report.cache}; {report.seconds} s")
    return 1 if report.problem else 0


def requests() -> dict[str, dict[str, Any]]:
    """Return a request of each kind whose kernels a start may leave out."""
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    return {
        "greedy": {"temperature": 0},
        "sampled": {"seed": 1},
        "top-k, top-p": {"seed": 1, "top_k": 20, "top_p": 0.9},
        "min-p": {"seed": 1, "min_p": 0.05},
        "penalties": {"temperature": 0, **penalties},
        # up to 1, 2, 4, ... of them have kernels of their own
        **{f"{number} logprobs": {"temperature": 0, "logprobs": number} for number in (0, 1, 2, 5, 10, 20)},
        "logprobs of the prompt": {"temperature": 0, "prompt_logprobs": 1},
        "biases": {"temperature": 0, "logit_bias": {"5": 1.0}, "min_tokens": 2, "stop_token_ids": [6]},
        "allowed tokens": {"temperature": 0, "allowed_token_ids": [3, 4, 5]},
        "bad words": {"temperature": 0, "bad_words": ["a"]},
        "grammar": {"temperature": 0, "structured_outputs": {"choice": ["a", "b"]}},
    }


def _problem() -> str | None:
    """Return why nothing can be compiled, with the way out."""
    decision = activation.decide()
    if not decision.activate:
        return f"{decision.reason} {decision.remedy or ''} (`npu doctor` shows every step.)"
    if config.asks_for_triton() is False:
        return (
            f"{config.what_leaves_triton_out()} serves without Triton kernels: nothing to compile. Unset it, or set "
            "TRITON_DEFAULT_BACKEND=npu, with VLLM_USE_V2_MODEL_RUNNER=0 for the V1 runner with them."
        )
    missing = availability.missing() or availability.why_not_for_vllm()
    return None if missing is None else f"Triton kernels cannot be compiled: {missing}."


def _serve(report: Report, say: Callable[[str], object], served: Sequence[str], ready_timeout: float) -> None:
    model, *arguments = served
    log = Path(tempfile.mkdtemp(prefix="npu-warm-")) / "server.log"
    report.log, report.cache = str(log), str(build.cache_folder())
    server = Server(model, *arguments, "--load-format", "dummy", log=log, name="warm")
    say(f"Starting vllm serve {model} with random weights (log: {log})")
    try:
        with _watched(report, say) as count, server:
            seconds = server.wait_until_ready(ready_timeout)
            by_start = count()
            say(f"Ready after {seconds:.1f} s")
            _ask(server, report)
            report.compiled_for_requests = count() - by_start
            for kind, reason in report.refused.items():
                say(f"  not answered: {kind}: {reason}")
            if not server.stop():
                report.problem = f"The server had to be killed; its log is {log}."
    except ServerError as error:
        report.problem = str(error)


def _ask(server: Server, report: Report) -> None:
    """Ask for each kind, alone and with others beside it."""
    prompts = [[3 + number % 5 for number in range(length)] for length in _LENGTHS]
    for kind, settings in requests().items():
        try:
            for prompt in (prompts[0], prompts[1], prompts):
                server.ask("/v1/completions", timeout=1800, prompt=prompt, max_tokens=4, **settings)
        except ServerError as error:
            report.refused[kind] = str(error).partition(". Last lines of")[0]


@contextlib.contextmanager
def _watched(report: Report, say: Callable[[str], object]) -> Iterator[Callable[[], int]]:
    """Tell of each kernel that comes into the cache; yields what looks now, and returns how many have come."""
    known, began, done, lock = set(_kernels()), time.monotonic(), threading.Event(), threading.Lock()

    def look() -> int:
        with lock:
            new = sorted(set(_kernels()) - known, key=lambda path: path.stat().st_mtime)
            known.update(new)
            for path in new:
                report.compiled.append(path.stem)
                say(f"  {time.monotonic() - began:5.1f} s: {path.stem}")
            report.in_cache = len(known)
            return len(report.compiled)

    def watch() -> None:
        while not done.wait(0.5):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield look
    finally:
        done.set()
        watcher.join()
        look()


def _kernels() -> list[Path]:
    """Return the libraries in Triton's cache, each in a folder of its own."""
    own = build.own_folder()
    return [path for path in build.cache_folder().glob("*/*.so") if path.parent != own]


def _say(text: str) -> None:
    print(text, flush=True)
