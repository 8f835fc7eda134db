"""Secrets that servers share: files that their owner alone can read."""

from __future__ import annotations

import errno
import queue
import stat
import threading
from pathlib import Path

from npu_kvconnector.errors import OptionError

__all__ = ["read_secret"]

_SHORTEST = 16


def read_secret(path: str | None, *, seconds: float = 30.0) -> bytes:
    """Return the bytes of a secret file without the white space around them, or none where there is no file.

    Raises:
        OptionError: it cannot be read, or not within these seconds, is too short, or others can read it.
    """
    if path is None:
        return b""
    try:
        mode, secret = _read_in_time(Path(path), seconds)
    except queue.Empty as error:
        msg = (
            f"secret_file={path} was not read within {seconds:.0f} s, its disk does not answer: see the system's log, "
            "or name a file on another disk"
        )
        raise OptionError(msg) from error
    except OSError as error:
        msg = (
            f"secret_file={path} cannot be read: {error.strerror or error}; name a file made with openssl rand -hex 32"
        )
        raise OptionError(msg) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        msg = f"secret_file={path} can be read by others (mode {stat.S_IMODE(mode):o}); run chmod 600 {path}"
        raise OptionError(msg)
    if len(secret) < _SHORTEST:
        msg = f"secret_file={path} holds {len(secret)} bytes, not {_SHORTEST} or more: use openssl rand -hex 32"
        raise OptionError(msg)
    return secret


def _read_in_time(path: Path, seconds: float) -> tuple[int, bytes]:
    """Return the file's mode and what is in it; read in a thread, since a call to a disk may never come back.

    Raises:
        OSError: of the system.
        queue.Empty: nothing came in time.
    """
    answers: queue.SimpleQueue[tuple[int, bytes] | OSError] = queue.SimpleQueue()

    def read() -> None:
        try:
            answers.put((path.stat().st_mode, path.read_bytes().strip()))
        except OSError as error:
            answers.put(error)
        except ValueError as error:  # a NUL in the name
            answers.put(OSError(errno.EINVAL, str(error)))

    # A daemon, so that the process can end meanwhile.
    threading.Thread(target=read, name="npu-kv-secret", daemon=True).start()
    answer = answers.get(timeout=seconds)
    if isinstance(answer, OSError):
        raise answer
    return answer
