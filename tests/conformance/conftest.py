"""Which cases run, which are known not to pass (skips.toml), and the share of the CPU's cases that pass on npu."""

from __future__ import annotations

import fnmatch
import tomllib
import zlib
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LISTED = tomllib.loads((HERE / "skips.toml").read_text())
PARTS = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=float, default=1.0, help="run this part of the cases, from 0 to 1, always the same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = config.getoption("part", 1.0) * PARTS
    left_out = {item for item in items if is_case(item) and zlib.crc32(item.name.encode()) % PARTS >= limit}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    for item in filter(is_case, items):
        if reason := reason_of(item.name, "skip"):
            item.add_marker(pytest.mark.skip(reason=f"skips.toml: {reason}"))
        elif reason := reason_of(item.name, "fails"):
            item.add_marker(pytest.mark.xfail(reason=f"skips.toml: {reason}", strict=True))


def is_case(item: pytest.Item) -> bool:
    """Return whether an item is of this folder: pytest shows a conftest the items of the whole run."""
    return item.path.is_relative_to(HERE)


def reason_of(name: str, table: str) -> str | None:
    """Return the reason that skips.toml gives for a test."""
    return next((reason for pattern, reason in LISTED[table].items() if fnmatch.fnmatchcase(name, pattern)), None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = Counter(outcome(report) for reports in terminalreporter.stats.values() for report in reports)
    counted = counts["passed"] + counts["failed"]
    if counted:
        terminalreporter.write_line(
            f"conformance: {counts['passed']} of {counted} cases that pass on the CPU pass on npu "
            f"({100 * counts['passed'] / counted:.2f} %); {counts['cpu']} fail on the CPU too, {counts['empty']} are empty"
        )


def outcome(report: object) -> str | None:
    """Return how a case counts: what skips.toml lists is a failure."""
    if not isinstance(report, pytest.TestReport) or "conformance" not in report.nodeid:
        return None
    if report.skipped:
        reason = str(report.longrepr) + str(getattr(report, "wasxfail", ""))
        if "skips.toml" in reason:
            return "failed"
        return "cpu" if "the CPU fails too" in reason else "empty"
    if report.failed:
        return "failed"
    return "passed" if report.when == "call" else None
