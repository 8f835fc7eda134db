"""A run of tests that is killed leaves none of the programs that it started."""

from __future__ import annotations

import os
import select
import subprocess
import sys

OWNER = """
import os
from tests.support.forks import ForkServer

fork = ForkServer("time").start(
    "import time; print('up', flush=True); time.sleep(600)",
    environ=dict(os.environ), stdout=os.fdopen(os.dup(1), "wb"), stderr=os.fdopen(os.dup(2), "wb"),
)
print(fork.pid, flush=True)
fork.wait()
"""


def test_programs_of_a_killed_owner_end() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        said = {owner.stdout.readline().strip(), owner.stdout.readline().strip()}
        (pid,) = said - {"up"}
        program = os.pidfd_open(int(pid))
        owner.kill()
        ended, _, _ = select.select([program], [], [], 30)
        os.close(program)
    assert ended
