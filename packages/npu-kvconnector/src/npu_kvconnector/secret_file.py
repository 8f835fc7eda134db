"""Secrets that servers share: files that their owner alone can read."""

from __future__ import annotations

import stat
from pathlib import Path

from npu_kvconnector.errors import OptionError

__all__ = ["read_secret"]

_SHORTEST = 16


def read_secret(path: str | None) -> bytes:
    """Return the bytes of a secret file without the white space around them, or none where there is no file.

    Raises:
        OptionError: it cannot be read, is too short, or others can read it.
    """
    if path is None:
        return b""
    try:
        mode = Path(path).stat().st_mode
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        msg = f"secret_file={path} cannot be read: {error.strerror}; name a file made with openssl rand -hex 32"
        raise OptionError(msg) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        msg = f"secret_file={path} can be read by others (mode {stat.S_IMODE(mode):o}); run chmod 600 {path}"
        raise OptionError(msg)
    if len(secret) < _SHORTEST:
        msg = f"secret_file={path} holds {len(secret)} bytes, not {_SHORTEST} or more: use openssl rand -hex 32"
        raise OptionError(msg)
    return secret
