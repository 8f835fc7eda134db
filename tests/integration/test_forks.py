"""A run of tests that is killed leaves none of the programs that it started."""

from __future__ import annotations

import os
import select
import subprocess
import sys

OWNER = """
import os
from tests.support.forks import ForkServer

reader, writer = os.pipe()
with open(writer, "wb") as its_output, open(os.devnull, "wb") as nothing:
    fork = ForkServer("time").start(
        "import time; print('up', flush=True); time.sleep(600)",
        environ=dict(os.environ), stdout=its_output, stderr=nothing,
    )
with open(reader) as its_words:
    print(fork.pid, its_words.readline(), flush=True)  # together, lest their pieces mix where Python doesn't buffer
fork.wait()
"""


def test_programs_of_a_killed_owner_end() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            pid, word = owner.stdout.readline().split()
            program = os.pidfd_open(int(pid))
        finally:
            owner.kill()
        ended, _, _ = select.select([program], [], [], 30)
        os.close(program)
    assert (word, bool(ended)) == ("up", True)
