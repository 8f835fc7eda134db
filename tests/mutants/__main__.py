"""Puts each fault of faults.toml into a copy of the code, runs the tests that should notice it, and takes it out again.

    python -m tests.mutants FOLDER [--only WORDS] [--table FILE]

FOLDER is a checkout of its own with an environment and a build of its own; `nox -s mutants` makes it. Ends with 1 where
a fault passed unnoticed, and at once where tests fail without one: what they notice would mean nothing. The table of
faults and tests goes to FILE between its two marks.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

FAULTS = Path(__file__).with_name("faults.toml")
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
LONGEST = 1200  # seconds that the tests of a fault may take
NATIVE = ("npu-ops", "npu-platform")


@dataclass(frozen=True)
class Fault:
    """One change that is wrong: `find`, which occurs once in `file`, becomes `replace`; `tests` are to fail."""

    name: str
    file: str
    find: str
    replace: str
    tests: list[str]

    @property
    def native(self) -> str | None:
        """The distribution whose library must be built again."""
        return next((each for each in NATIVE if self.file.startswith(f"packages/{each}/csrc")), None)


def main() -> int:
    """Try the faults one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("folder", type=Path, help="checkout that may be changed")
    parser.add_argument("--only", default="", help="try the faults whose name or file holds these words")
    parser.add_argument("--table", type=Path, help="file to write the table into")
    arguments = parser.parse_args()
    faults = [Fault(**fault) for fault in tomllib.loads(FAULTS.read_text())["fault"]]
    chosen = [fault for fault in faults if arguments.only in f"{fault.name} {fault.file}"]
    noticed = {}
    for fault in chosen:
        noticed[fault.name] = failing_test(arguments.folder, fault)
        print(f"{'noticed' if noticed[fault.name] else 'NOT NOTICED'}: {fault.name}: {noticed[fault.name]}", flush=True)
    if arguments.table:
        write_table(arguments.table, [(fault, noticed[fault.name]) for fault in chosen])
    return 0 if chosen and all(noticed.values()) else 1


def failing_test(folder: Path, fault: Fault) -> str | None:
    """Return the first test that fails with a fault in the code, None where none does."""
    file = folder / fault.file
    sound = file.read_text()
    if sound.count(fault.find) != 1:
        msg = f"{fault.name}: its text occurs {sound.count(fault.find)} times in {fault.file}: bring faults.toml up to date"
        raise SystemExit(msg)
    check_without_fault(folder, tuple(fault.tests))
    file.write_text(sound.replace(fault.find, fault.replace))
    try:
        build(folder, fault)
        return first_failure(folder, fault.tests)
    finally:
        file.write_text(sound)
        build(folder, fault)


@functools.cache
def check_without_fault(folder: Path, tests: tuple[str, ...]) -> None:
    """Raise SystemExit where tests fail on sound code."""
    if (failed := first_failure(folder, [*tests])) is not None:
        msg = f"{failed} fails without a fault: mend it first, or build {folder} anew"
        raise SystemExit(msg)


def build(folder: Path, fault: Fault) -> None:
    """Build what was changed, and put it into the folder's environment."""
    if fault.native:
        place = folder / "packages" / fault.native / "build" / "mutants"
        site = next((folder / ".venv").glob("lib/python*/site-packages"))
        for command in (("--build", str(place), "-j", "2"), ("--install", str(place), "--prefix", str(site))):
            run(folder, "cmake", *command, check=True)


def first_failure(folder: Path, tests: list[str]) -> str | None:
    """Run tests until one fails and return its name."""
    done = run(folder, str(folder / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not found:
        msg = f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        raise SystemExit(msg)
    return found[1]


def run(folder: Path, *command: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONGEST, check=False)
    if check and done.returncode:
        msg = f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        raise SystemExit(msg)
    return done


def write_table(file: Path, rows: list[tuple[Fault, str | None]]) -> None:
    """Write the faults and the tests that noticed them into a page, between its marks."""
    lines = ["| fault | in | noticed by |", "|---|---|---|"]
    for fault, test in rows:
        place = fault.file.removeprefix("packages/").replace("/src/", "/")
        lines.append(f"| {fault.name} | `{place}` | {f'`{short(test)}`' if test else '**nothing**'} |")
    before, rest = file.read_text().split(BEGIN)
    file.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")


def short(test: str) -> str:
    """Return a test's name without its parameters and the folders that all share."""
    return re.sub(r"\[.*", "", test).removeprefix("packages/")


if __name__ == "__main__":
    sys.exit(main())
