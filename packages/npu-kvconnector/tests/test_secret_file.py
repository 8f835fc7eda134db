"""Secret files: read where their owner alone can read them, else refused with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from npu_kvconnector.errors import OptionError
from npu_kvconnector.secret_file import read_secret


def test_a_secret_is_read_from_a_file_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o644)
    with pytest.raises(OptionError, match="chmod 600"):
        read_secret(str(path))
    path.chmod(0o600)
    assert read_secret(str(path)) == b"0123456789abcdef"
    path.write_text("short")
    with pytest.raises(OptionError, match="openssl rand"):
        read_secret(str(path))
    for name in ("none", "a\0b"):
        with pytest.raises(OptionError, match="cannot be read"):
            read_secret(str(tmp_path / name))
    assert read_secret(None) == b""


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    """A file whose reading does not return: a FIFO that nobody writes to."""
    path = tmp_path / "fifo"
    os.mkfifo(path, 0o600)
    return path


def test_a_disk_that_hangs_is_not_waited_for_for_ever(hung: Path) -> None:
    began = time.monotonic()
    with pytest.raises(OptionError, match=r"secret_file=.*fifo was not read within 0 s.*another disk"):
        read_secret(str(hung), seconds=0.2)
    assert 0.2 <= time.monotonic() - began < 10
    hung.write_bytes(b"")  # lets the thread end


def test_a_disk_that_answers_late_and_in_time_is_waited_for(hung: Path) -> None:
    later = threading.Timer(0.2, hung.write_bytes, [b"0123456789abcdef\n"])
    later.start()
    assert read_secret(str(hung), seconds=60) == b"0123456789abcdef"
    later.join()


STARTS = """
import sys
from npu_kvconnector.errors import OptionError
from npu_kvconnector.secret_file import read_secret
try:
    read_secret(sys.argv[1], seconds=0.2)
except OptionError as error:
    print("REFUSED", error)
"""


def test_a_process_ends_whose_secret_hung(hung: Path) -> None:
    command = [sys.executable, "-c", STARTS, str(hung)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "REFUSED secret_file=" in done.stdout
