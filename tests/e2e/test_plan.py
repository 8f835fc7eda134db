"""What `npu doctor --plan` says before a start is what the log of that start says of each rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from npu_platform.demo import MODEL
from tests.support.server import serve_demo

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly
DOCTOR = "import sys; from npu_platform.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pipeline-parallel-size", "2", "--additional-config", '{"npu": {"num_threads": 1}}'),
        ("--data-parallel-size", "2"),
    ],
    ids=["threads", "replicas"],
)
def test_ranks_get_what_the_plan_says(arguments: tuple[str, ...], tmp_path: Path) -> None:
    environ = {"NPU_SIMULATOR_DEVICES": "4", "NPU_SIMULATOR_MEMORY": "1GiB"}
    command = [sys.executable, "-c", DOCTOR, "doctor", "--json", "--plan", "--", str(MODEL), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, timeout=120, check=False)
    found = [finding for finding in json.loads(done.stdout)["findings"] if finding["section"] == "plan"]
    planned = [f"{finding['name']}: {finding['detail']}" for finding in found]
    with serve_demo(tmp_path, *arguments, **environ) as server:
        got = re.findall(r"replica \d+, stage \d+, part \d+: .*", server.log.read_text())
    assert len(planned) >= 2
    assert sorted(got) == planned  # replicas of a dense model come up in any order
