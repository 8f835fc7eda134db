"""A C++ compiler that notes what it is asked to compile."""

from __future__ import annotations

import shlex
from pathlib import Path

from npu_platform import config

__all__ = ["compilations", "noting_compiler"]


def noting_compiler(folder: Path) -> dict[str, str]:
    """Make the compiler in a folder, and return the variable that names it."""
    real = config.cxx_compiler()
    assert real is not None
    script, log = folder / "compiler", folder / "compilations"
    script.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(log))}\nexec {shlex.quote(real)} "$@"\n')
    script.chmod(0o755)
    return {"CXX": str(script)}


def compilations(folder: Path) -> int:
    """Return how many times it has compiled; to be asked for its version does not count."""
    lines = (folder / "compilations").read_text().splitlines()
    return sum("-shared" in line.split() for line in lines)
