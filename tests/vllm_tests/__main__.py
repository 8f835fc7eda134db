"""Runs vLLM's tests of many devices with the device npu: ``nox -s vllm_tests``, or with the folder of its sources:

python -m tests.vllm_tests SOURCES --work FOLDER [--only WORDS] [--page FILE]

The tests are copied, and in the copy the name of the device is changed, where a test names one; what cannot be read on
an npu, such as memory by NVML, is left out (:data:`EDITS`). What ran before is kept in the folder and not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from tests.vllm_tests import hub

TABLE = Path(__file__).with_name("files.toml")
NAMES = [
    (r'"cuda"', '"npu"'),
    (r"cuda:\{", "npu:{"),
    (r'"cuda:0"', '"npu:0"'),
    (r"cuda:nccl", "npu:npuccl"),
    (r"\.cuda\(\)", ".npu()"),
    (r"torch\.cuda\.", "torch.npu."),
    (r"num_gpus=1, max_calls=1", "num_cpus=0, max_calls=1"),
]
"""How a test names a device, and how it does here."""
EDITS = {
    "utils.py": [
        (r"(?<=\n    assert )threshold_bytes is not None or threshold_ratio is not None\n", "True\n    return\n"),
    ],
}
"""vLLM's helpers: what memory a device has left is asked of NVML."""
LIMIT = 900  # seconds of a file


def main() -> None:
    """Run what has not run yet, and write the page."""
    parser = argparse.ArgumentParser(prog="tests.vllm_tests", description=__doc__)
    parser.add_argument("sources", type=Path, help="vLLM's source distribution, unpacked")
    parser.add_argument("--work", type=Path, required=True, help="folder for the copy, the models and the results")
    parser.add_argument("--only", default="", help="files of which the path has this")
    parser.add_argument("--page", type=Path, help="file for the table")
    options = parser.parse_args()
    table = tomllib.loads(TABLE.read_text())
    prepare(options.sources.resolve(), options.work.resolve(), table)
    for name, file in table["run"].items():
        result = result_of(options.work, name)
        if options.only in name and not result.exists():
            print(time.strftime("%H:%M:%S"), name, flush=True)
            run(options.work.resolve(), name, file, result)
            print("  ", dict(counts(result)), flush=True)
    if options.page:
        options.page.write_text(page(options.work, table))


def prepare(sources: Path, work: Path, table: dict[str, Any]) -> None:
    """Copy and edit the tests, and write the models."""
    hub.fill(work / "hub" / "hub")
    copy = work / "vllm"
    if copy.exists():
        return
    shutil.copytree(sources / "tests", copy / "tests")
    shutil.copy(sources / "pyproject.toml", copy)
    for name, edits in (EDITS | {name: NAMES for name, file in table["run"].items() if file.get("named")}).items():
        path = copy / "tests" / name
        text = path.read_text()
        for old, new in edits:
            text = re.sub(old, new, text)
        path.write_text(text)


def run(work: Path, name: str, file: dict[str, Any], result: Path) -> None:
    """Run one file of tests in a session of its own; what is left of it after the limit is killed."""
    result.parent.mkdir(parents=True, exist_ok=True)
    report = work / "junit.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"tests/{name}", "-q", "-p", "no:cacheprovider", "--asyncio-mode=auto"]
    command += [f"--timeout={file.get('timeout', 240)}", f"--junitxml={report}", *file.get("options", [])]
    environ = (
        os.environ
        | {
            "HF_HOME": str(work / "hub"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "NPU_SIMULATOR_DEVICES": "4",
            "NPU_SIMULATOR_MEMORY": "2GiB",
            "NPU_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        | file.get("environ", {})
    )
    begin = time.monotonic()
    with result.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=work / "vllm", env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = {"seconds": round(time.monotonic() - begin), "status": process.returncode}
    result.write_text(json.dumps(found | {"tests": outcomes(report)}, indent=1))


def outcomes(report: Path) -> dict[str, str]:
    """Return the outcome of each test, with the first line of why."""
    if not report.exists():
        return {}
    found = {}
    for case in ET.parse(report).iter("testcase"):
        failed = [part for part in case if part.tag in ("failure", "error", "skipped")]
        why = f"{failed[0].tag}: {(failed[0].get('message') or '').splitlines()[:1]}" if failed else "passed"
        found[case.get("name", "")] = why
    return found


def result_of(work: Path, name: str) -> Path:
    """Return the file of a result."""
    return work / "results" / f"{name.removesuffix('.py').replace('/', '.')}.json"


def counts(result: Path) -> Counter[str]:
    """Return how many tests of a file had each outcome."""
    words = (outcome.partition(":")[0] for outcome in json.loads(result.read_text())["tests"].values())
    return Counter("failed" if word in ("failure", "error") else word for word in words)


def page(work: Path, table: dict[str, Any]) -> str:
    """Return the page."""
    lines = [*HEAD, "| tests | passed | failed | skipped | why |", "|---|---|---|---|---|"]
    for name, file in table["run"].items():
        result = result_of(work, name)
        found = counts(result) if result.exists() else Counter()
        numbers = " | ".join(str(found[word]) for word in ("passed", "failed", "skipped"))
        lines.append(f"| `{name}` | {numbers if found else '- | - | -'} | {file.get('why', '')} |")
    lines += ["", "Not run:", "", "| tests | why |", "|---|---|"]
    lines += [f"| {' '.join(f'`{name}`' for name in one['files'])} | {one['why']} |" for one in table["left_out"]]
    return "\n".join(lines) + "\n"


HEAD = [
    "# vLLM's tests of many devices",
    "",
    "vLLM 0.32.0's own tests, from its source distribution, with four npu devices: `nox -s vllm_tests` runs them and writes this",
    "page. Models are small and random under the names that the tests ask for; where a test names a device, it is npu. `-`: not",
    "run yet.",
    "",
]

if __name__ == "__main__":
    main()
