"""Where the seconds of a start go: ``nox -s bench -- start`` draws them into start.md of this machine's pages.

A start is a process of its own that ends with the first token of a prompt of 16, once as a program with ``vllm.LLM`` and
once as ``vllm serve`` asked over HTTP. What is read from files is in the host's cache: the first start of each is not counted.
With ``--runners V1 V2`` vLLM's model runners are compared, in turns.
The model has the shape of Qwen3-0.6B, and its weights are a file of random numbers. Parts are told by the lines of the log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_platform.demo.server import free_port
from tests.benchmarks import machine, pages
from tests.benchmarks.checkpoint import write_model
from tests.benchmarks.engine_cases import QWEN3_06B, TINY

ROOT = Path(__file__).parents[2]
ENGINE = {"max_model_len": 4096}
UP = re.compile(r"npu worker: up after (?P<total>\S+) s: (?P<parts>.*)$")
ENGINE_MODULES = ("vllm.v1.engine.core", "npu_platform.worker", "npu_platform.model_runner")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is not meant for the loopback interface
JSON = {"Content-Type": "application/json"}
TITLES = {"LLM": "`vllm.LLM`", "serve": "`vllm serve`"}
RUNNERS = {"V1": "0", "V2": "1"}  # VLLM_USE_V2_MODEL_RUNNER
PACKAGES = 12  # rows of a table of imports
FRONT, BACK = "front end: ", "engine process: "


@dataclass
class Lines:
    """What a process says, each line with the time at which it was read."""

    stamped: list[tuple[float, str]] = field(default_factory=list)

    def read(self, stream: Any) -> None:
        """Stamp all lines of a stream until its end."""
        self.stamped += ((time.time(), line.rstrip()) for line in stream)

    def when(self, text: str) -> float:
        """Return when the first line with this text came; raises RuntimeError with the last lines if none did."""
        for at, line in self.stamped:
            if text in line:
                return at
        msg = f"no line {text!r} in:\n" + "\n".join(line for _, line in self.stamped[-40:])
        raise RuntimeError(msg)


def main(arguments: list[str] | None = None) -> None:
    """Measure, keep the seconds as JSON beside the page, and draw the page; `--ways` without a name: the imports alone."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.start", description=__doc__)
    parser.add_argument("--shape", choices=("Qwen3-0.6B", "tiny"), default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each way that count (default 3)")
    parser.add_argument("--ways", nargs="*", choices=("LLM", "serve"), default=["LLM", "serve"])
    parser.add_argument(
        "--dummy", action="store_true", help="random weights made at start, as the engine's benchmark does"
    )
    parser.add_argument(
        "--runners", nargs="+", choices=RUNNERS, help="compare vLLM's model runners, in turns (default: vLLM's choice)"
    )
    parser.add_argument("--no-imports", action="store_true", help="do not list the imports")
    parser.add_argument("--model", help="folder for the model, kept and used again (default: a temporary one)")
    parser.add_argument("--results", help="folder for start.json and start.md (default: docs/benchmarks/MACHINE)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(options.model or folder) / "model"
        write_model(model, QWEN3_06B if options.shape == "Qwen3-0.6B" else TINY)
        record = measure(model, options)
    place = Path(options.results) if options.results else pages.folder()
    place.mkdir(parents=True, exist_ok=True)
    file = place / "start.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("machine", {}).get("commit") == record["machine"]["commit"]:  # the page names one
        for part in ("ways", "imports"):  # what this run left out stays
            record[part] = before.get(part, {}) | record[part]
    file.write_text(json.dumps(record, indent=1) + "\n")
    title = f"The start on {record['machine']['processor']}"
    pages.insert(place / "start.md", "start", page(record), title)
    print(page(record))


def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each part, a list of the rounds, by way of starting."""
    record: dict[str, Any] = {"suite": "start", "machine": machine.facts(), "shape": options.shape}
    record |= {"ways": {}, "imports": {}}
    for way in options.ways:
        for name, counted in in_turns(way, model, options).items():
            record["ways"][name] = {part: [one.get(part, 0.0) for one in counted] for part in counted[-1]}
    if not options.no_imports:
        record["imports"]["vllm.LLM"] = imports("from vllm import LLM")
        record["imports"]["vllm.LLM and the engine"] = imports(
            f"from vllm import LLM; import {', '.join(ENGINE_MODULES)}"
        )
    return record


def in_turns(way: str, model: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of each part by round, of each runner that is compared; who begins changes with the round."""
    engine = ENGINE | ({"load_format": "dummy"} if options.dummy else {})
    names = [f"{way}, {runner}" for runner in options.runners] if options.runners else [way]
    counted: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        for name in names if number % 2 else reversed(names):
            runner = RUNNERS.get(name.rpartition(", ")[2])
            environ = {"VLLM_USE_V2_MODEL_RUNNER": runner} if runner else {}
            parts = (in_a_program if way == "LLM" else served)(model, engine, environ)
            print(f"{name}, {'not counted' if number == 0 else number}: {sum(parts.values()):.2f} s", flush=True)
            counted[name] += [parts] if number else []
    return counted


def in_a_program(model: Path, engine: dict[str, Any], environ: dict[str, str]) -> dict[str, float]:
    """Return the seconds of the parts of a start by ``vllm.LLM``."""
    command = [sys.executable, "-m", "tests.benchmarks.start_contestant", str(model), json.dumps(engine)]
    begin, lines = time.time(), Lines()
    process = started(command, environ)
    lines.read(process.stdout)
    process.wait()
    marks = {name: lines.when(f"MARK {name}") for name in ("interpreter", "imports", "engine", "token")}
    parts = {FRONT + "interpreter": marks["interpreter"] - begin}
    parts[FRONT + "import vllm"] = marks["imports"] - marks["interpreter"]
    parts |= engine_parts(lines, marks["imports"])
    parts["scheduler, handshake"] = marks["engine"] - up(lines)[0]
    parts["first prompt"] = marks["token"] - marks["engine"]
    return parts


def served(model: Path, engine: dict[str, Any], environ: dict[str, str]) -> dict[str, float]:
    """Return the seconds of the parts of a start by ``vllm serve``, until a token came over HTTP."""
    url = f"http://127.0.0.1:{free_port()}"
    options = [part for key, value in engine.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", url.rpartition(":")[2]]
    begin, lines = time.time(), Lines()
    process = started([*command, *options], environ)
    reader = threading.Thread(target=lines.read, args=(process.stdout,))
    reader.start()
    try:
        while not answers(f"{url}/health"):
            time.sleep(0.02)
            if process.poll() is not None:
                lines.when("a server")
        ready = time.time()
        prompt = {"model": str(model), "prompt": list(range(10, 26)), "max_tokens": 1, "temperature": 0}
        asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(prompt).encode(), JSON)
        with DIRECT.open(asked) as answer:
            answer.read()
        token = time.time()
    finally:
        process.terminate()
        process.wait()
        reader.join()
    first = lines.when("vLLM")
    parts = {FRONT + "interpreter, import vllm": first - begin, **engine_parts(lines, first)}
    parts["scheduler, handshake, HTTP"] = ready - up(lines)[0]
    parts["first prompt"] = token - ready
    return parts


def answers(url: str) -> bool:
    """Say whether somebody answers there."""
    with contextlib.suppress(OSError), DIRECT.open(url):
        return True
    return False


def started(command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    """Start a process whose words, and those of its children, are one stream."""
    environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | environ
    return subprocess.Popen(
        command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def engine_parts(lines: Lines, imported: float) -> dict[str, float]:
    """Return the seconds from the front end's imports to the worker that is up."""
    at, total, parts = up(lines)
    return {FRONT + "configuration": at - total - imported} | {BACK + name: seconds for name, seconds in parts.items()}


def up(lines: Lines) -> tuple[float, float, dict[str, float]]:
    """Return when the worker was up, the age of its process then, and the parts that it tells."""
    at = lines.when("npu worker: up after")
    found = next(match for _, line in lines.stamped if (match := UP.search(line)))
    parts = (part.rpartition(" ") for part in found["parts"].split(", "))
    return at, float(found["total"]), {name: float(seconds) for name, _, seconds in parts}


def imports(statement: str) -> dict[str, float]:
    """Return the seconds of an import by package, the longest first; the second of two processes counts."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    total: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        if match := re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", line):
            total[match[2].partition(".")[0]] += int(match[1]) / 1e6
    return dict(total.most_common(PACKAGES)) | {"all": sum(total.values())}


def page(record: dict[str, Any]) -> str:
    """Return the tables."""
    where = record["machine"]
    method = (
        f"Machine: {where['processor']}, {where['cores']} cores; measured {where['date']} UTC at commit {where['commit']}. "
        f"Model: the shape of {record['shape']}. Median of the rounds; what is read from files is in the host's cache, and "
        "what vLLM and npu-ops keep of a first start is there."
    )
    text = [method]
    for way, parts in record["ways"].items():
        rounds = [sum(each) for each in zip(*parts.values(), strict=True)]
        rows = [f"| {name} | {statistics.median(seconds):.2f} |" for name, seconds in parts.items()]
        method_of_starting, comma, runner = way.partition(", ")
        title = TITLES[method_of_starting] + comma + runner
        total = (
            f"| **to the first token** | **{statistics.median(rounds):.2f}** ({min(rounds):.2f} to {max(rounds):.2f}) |"
        )
        text.append("\n".join([f"| {title} | s |", "|---|---|", *rows, total]))
    if record["imports"]:
        text.append("Imports by `python -X importtime`, which takes its own time:")
    for what, packages in record["imports"].items():
        rows = [f"| {name} | {seconds:.2f} |" for name, seconds in packages.items()]
        text.append("\n".join([f"| imports of {what}, by package | s |", "|---|---|", *rows]))
    return "\n\n".join(text)


if __name__ == "__main__":
    main()
