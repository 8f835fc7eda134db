"""Prints where the time of a run of nox went: its sessions, its longest tests, and its slowest compilations.

Reads pytest's JUnit files in the folder that is given, and the logs that ninja keeps in the packages' build folders.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

TESTS = 25
COMPILATIONS = 20


def main(folder: Path) -> None:
    """Print the three lists; what was not run is not in them."""
    suites = {file.stem: suite for file in sorted(folder.glob("*.xml")) for suite in ET.parse(file).iter("testsuite")}
    show("Sessions' tests", [(float(suite.get("time", 0)), name) for name, suite in suites.items()])
    show(f"The {TESTS} longest tests", longest(suites)[:TESTS])
    compiled = compilations(Path.cwd())
    total = sum(seconds for seconds, _ in compiled)
    show(f"The {COMPILATIONS} slowest of {len(compiled)} compilations, {total:.0f} s in all", compiled[:COMPILATIONS])


def longest(suites: dict[str, ET.Element]) -> list[tuple[float, str]]:
    """Return seconds and name of each test, the longest first."""
    cases = [case for suite in suites.values() for case in suite.iter("testcase")]
    named = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    return sorted(named, reverse=True)


def compilations(root: Path) -> list[tuple[float, str]]:
    """Return seconds and name of each object file that the last builds made, the slowest first.

    A file that a compiler cache gave took a moment, and says so.
    """
    seconds = {}
    for log in root.glob("packages/*/build/*/.ninja_log"):
        for line in log.read_text().splitlines():
            if not line.startswith("#") and (fields := line.split("\t"))[3].endswith(".o"):
                seconds[f"{log.parts[-4]}: {fields[3]}"] = (int(fields[1]) - int(fields[0])) / 1000
    return sorted(((taken, name) for name, taken in seconds.items()), reverse=True)


def show(title: str, rows: list[tuple[float, str]]) -> None:
    """Print one list."""
    print(f"\n{title}")
    for seconds, name in rows:
        print(f"{seconds:8.1f} s  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
