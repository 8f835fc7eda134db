"""Owns a quick way to the source of a function: what :func:`inspect.getsourcelines` returns, found by indentation.

Triton asks for the source of each kernel when its module is imported, and Python 3.11 splits it into tokens for that,
in Python: most of a second for the kernels that vLLM's V2 runner brings, nearly all of which a model never launches.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["getsourcelines"]

_DEF = re.compile(r" *(async +)?def\b")
_exactly: Callable[[Any], tuple[list[str], int]] = inspect.getsourcelines


def getsourcelines(function: Any) -> tuple[list[str], int]:
    """Return the lines of a function and the number of the first, as Python's own function of this name does.

    That one is asked where the end is in doubt, and for all else than plain functions. Raises OSError without a source.
    """
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return _exactly(function)
    lines, first = inspect.findsource(function)
    end = _end(lines, first, _last_line(function.__code__))
    return _exactly(function) if end is None else (lines[first:end], first + 1)


def _last_line(code: types.CodeType) -> int:
    """Return the last line of the file, from 1 on, that any part of `code` was made of."""
    own = (end for _, end, _, _ in code.co_positions() if end is not None)
    inner = (_last_line(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return max(itertools.chain(own, inner), default=sys.maxsize)


def _end(lines: list[str], first: int, last: int) -> int | None:
    """Return the index behind the last line of the function that begins at index `first`; None: in doubt.

    `last`: what :func:`_last_line` says. It ends before the next line that is indented no more than its ``def``, and
    comments and empty lines in front of that are not its own. A bracket or a string that reaches further to the left
    puts such a line in front of `last`, or leaves a string open.
    """
    start = next((index for index in range(first, min(last, len(lines))) if _DEF.match(lines[index])), None)
    if start is None:
        return None
    column = _column(lines[start])
    end = next(
        (n for n in range(start + 1, len(lines)) if _column(lines[n]) <= column and _begins(lines[n])), len(lines)
    )
    while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
        end -= 1
        if lines[end].strip() and _column(lines[end]) > column:
            return None  # a comment, which may belong to it
    text = "".join(lines[start:end])
    doubtful = end < last or text.endswith("\\\n") or "\t" in text or text.count('"""') % 2 or text.count("'''") % 2
    return None if doubtful else end


def _column(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _begins(line: str) -> bool:
    """Say whether a statement may begin in a line, for all that the line says."""
    text = line.strip()
    return bool(text) and text[0] not in "#)]}"
