"""Secret files: read where their owner alone can read them, else refused with the way out."""

from __future__ import annotations

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
    with pytest.raises(OptionError, match="cannot be read"):
        read_secret(str(tmp_path / "none"))
    assert read_secret(None) == b""
