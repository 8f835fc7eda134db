"""The command ``npu``: reads the arguments and calls the room that does the work.

Exit codes of every sub-command: 0 all is well, 1 a problem was found (it is printed, with its remedy), 2 wrong usage,
141 the reader of the output has gone, as after `npu info | head`, 143 and 129 it was ended by SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["main"]

_EPILOG = "exit codes: 0 all is well, 1 a problem was found (it is printed, with its remedy), 2 wrong usage"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sub-command that `arguments` (default: the process's) name and return the exit code."""
    try:
        try:
            own, served = _split(sys.argv[1:] if arguments is None else arguments)
            options, unknown = _parser().parse_known_args(own, argparse.Namespace(served=served))
            if unknown:
                _refuse(unknown, options)
            run: Callable[[argparse.Namespace], int] = options.run
            return run(options)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on; what the interpreter flushes when it exits must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell reports a program that SIGPIPE has ended


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return our arguments, and those of ``vllm serve`` that follow ``--plan --`` and ``warm --``."""
    if "--" not in arguments or not ("--plan" in arguments or arguments[0] == "warm"):
        return arguments, ()
    place = list(arguments).index("--")
    return arguments[:place], arguments[place + 1 :]


def _refuse(unknown: Sequence[str], options: argparse.Namespace) -> None:
    """End with code 2; who forgot the ``--`` before arguments of ``vllm serve`` is told so."""
    hint = f" (arguments of vllm serve stand behind --: {options.serves})" if options.serves else ""
    options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="npu", description="vLLM on an NPU: show it, check it.", epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = _add(commands, "demo", "serve the small model that ships with npu-platform, ask it something, stop", _demo)
    demo.add_argument(
        "--ready-timeout", type=float, default=300.0, metavar="SECONDS", help="to wait for the server (default 300)"
    )
    doctor = _add(commands, "doctor", "trace every plugin decision and name each problem with its remedy", _doctor)
    doctor.add_argument("--model", help="load this model (folder or name) and show what each layer runs")
    ranks = (
        "show what each rank of `vllm serve` with these arguments would get: --plan -- MODEL --tensor-parallel-size 2"
    )
    doctor.add_argument("--plan", action="store_true", help=ranks)
    doctor.set_defaults(serves="npu doctor --plan -- MODEL")
    info = _add(commands, "info", "show the devices, their memory, and which implementation runs each op", _info)
    layers = "load MODEL (folder or name; default: the demo model) and show which implementation each layer runs"
    info.add_argument("--ops", nargs="?", const="", metavar="MODEL", help=layers)
    what = "compile the Triton kernels of `vllm serve` with these arguments, into the cache: npu warm -- MODEL"
    warm = _add(commands, "warm", what, _warm)
    warm.add_argument(
        "--ready-timeout", type=float, default=1800.0, metavar="SECONDS", help="to wait for the server (default 1800)"
    )
    warm.usage = "npu warm [--json] [--ready-timeout SECONDS] -- MODEL [arguments of vllm serve]"
    warm.set_defaults(serves="npu warm -- MODEL")
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=_EPILOG)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser, serves=None)
    return parser


# Each room is imported when it is asked for: doctor must work where torch or vLLM do not.


def _demo(options: argparse.Namespace) -> int:
    from npu_platform.demo.command import run

    with _exit_by_signals():
        return run(as_json=options.json, ready_timeout=options.ready_timeout)


def _doctor(options: argparse.Namespace) -> int:
    if options.plan and not options.served:
        options.parser.error("it needs a model: npu doctor --plan -- MODEL [arguments of vllm serve]")
    from npu_platform.doctor import run

    return run(as_json=options.json, model=options.model, plan=options.served if options.plan else None)


def _info(options: argparse.Namespace) -> int:
    from npu_platform.info import run

    return run(as_json=options.json, model=options.ops)


def _warm(options: argparse.Namespace) -> int:
    if not options.served:
        options.parser.error("it needs a model: npu warm -- MODEL [arguments of vllm serve]")
    from npu_platform.triton.warm import run

    with _exit_by_signals():
        return run(as_json=options.json, served=options.served, ready_timeout=options.ready_timeout)


@contextlib.contextmanager
def _exit_by_signals() -> Iterator[None]:
    """Let signals that would end this process at once unwind it: its server, in a session of its own, would stay."""
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # the server is being stopped: let it be
    sys.exit(128 + number)  # as a shell reports a program that the signal has ended


if __name__ == "__main__":
    sys.exit(main())
