"""The seeded faults of `nox -s mutants` still fit the code: text that moved is found by day, and not by the night's run."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.mutants.__main__ import FAULTS, Fault
from tests.support.environments import ROOT

SEEDED = [Fault(**fault) for fault in tomllib.loads(FAULTS.read_text())["fault"]]


@pytest.mark.parametrize("fault", SEEDED, ids=lambda fault: fault.name)
def test_its_text_is_there_once_and_its_tests_are_there(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.find) == 1
    assert fault.replace != fault.find
    for test in fault.tests:
        place, _, name = test.partition("::")
        assert (ROOT / place).exists()
        assert not name or name.partition("[")[0] in (ROOT / place).read_text()


def test_the_cases_that_are_named_are_there() -> None:
    cases = {test for fault in SEEDED for test in fault.tests if "[" in test}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
