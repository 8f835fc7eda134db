"""The seeded faults of `nox -s mutants` still fit the code: text that moved is found by day, and not by the night's run."""

from __future__ import annotations

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
