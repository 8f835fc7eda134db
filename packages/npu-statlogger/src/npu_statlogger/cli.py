"""The command npu-stat: its arguments, and what its exit codes mean; each command has a module in `tools`.

Exit codes: 0 done; 1 no whole line found; 2 wrong usage or a file that cannot be read; 3 what the command checks does
not hold (`slo`, `diff --fail-over`, `doctor`); 130 interrupted; 141 the reader of the output has gone, as after
`npu-stat summary FILE | head`.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from npu_statlogger.errors import NoLinesError, StatLoggerError
from npu_statlogger.tools import dashboard, diff, doctor, merge, replay, report, slo, summary, tail, top

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = (summary, top, tail, report, diff, merge, slo, replay, doctor, dashboard)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run npu-stat and return its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on; what the interpreter flushes when it exits must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell reports a program that SIGPIPE has ended
    except OSError as error:  # a full disk behind stdout
        print(f"npu-stat: cannot write the output: {error.strerror}.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        return 128 + 2  # SIGINT


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="npu-stat", description="Read the statistics that npu-statlogger wrote.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except StatLoggerError as error:
        print(f"npu-stat: {error}", file=sys.stderr)
        return 1 if isinstance(error, NoLinesError) else 2


if __name__ == "__main__":
    sys.exit(main())
