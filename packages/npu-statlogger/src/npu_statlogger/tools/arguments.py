"""What commands have in common on the command line."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import NoReturn, TypeAlias

from npu_statlogger.errors import InputError

__all__ = ["Commands", "add_files", "count", "refuse_without", "seconds", "share", "write_text"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the files that a command reads."""
    text = "a file of npu-statlogger (rotated ones are read with it), gzip of one, or a result of `vllm bench serve`"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=text)


def count(text: str) -> int:
    """Return a number of things that a user wrote.

    Raises:
        argparse.ArgumentTypeError: it is none, or negative.
    """
    if not text.strip().isdecimal():
        msg = f"{text!r} is no count; write one such as 0 or 10"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def seconds(text: str) -> float:
    """Return a time that a user wrote, in seconds: 250ms, 1.5s, 2 (seconds), 10min, 6h, 1d.

    Raises:
        argparse.ArgumentTypeError: it is none, or negative.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip())
    if not match or match[2] not in _UNITS:
        msg = f"{text!r} is no time; write one such as 250ms, 1.5s, 10min, 6h"
        raise argparse.ArgumentTypeError(msg)
    return float(match[1]) * _UNITS[match[2]]


def share(text: str) -> float:
    """Return a share between 0 and 1 that a user wrote as 99.9% or 0.999.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        msg = f"{text!r} is no share between 0 and 1; write one such as 99.9% or 0.999"
        raise argparse.ArgumentTypeError(msg)
    return value


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named.

    Raises:
        InputError: the system refuses it.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror}."
        raise InputError(msg) from error


def refuse_without(module: str, command: str, error: ImportError) -> NoReturn:
    """Raise InputError where the library of a command is not installed; its extra has the command's name."""
    msg = f"`npu-stat {command}` needs {module}; install it with: pip install 'npu-statlogger[{command}]'."
    raise InputError(msg) from error
