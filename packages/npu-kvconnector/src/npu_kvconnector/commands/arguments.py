"""The command lines of `npu-kv` about stores, and how their reports are printed."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_kvconnector.config import parse_bytes
from npu_kvconnector.errors import KVConnectorError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["arguments_of_stores", "run_command"]

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def arguments_of_stores(commands: Any) -> None:
    """Add the commands to a parser's subparsers."""
    command = _add(commands, "ls", _ls, "blocks of a store")
    _add_realm(command, "only those of realms that begin so")
    command.add_argument("--limit", type=_at_least(0), default=1000, help="most blocks to list (1000)")
    _add(commands, "stat", _stat, "counts and bytes of a store, by realm")
    _add(commands, "verify", _verify, "read every block; 1 where one is damaged; a server may run")
    _add(commands, "scrub", _scrub, "read every block, give up damaged ones; 1 where there were any")
    command = _add(commands, "gc", _gc, "remove blocks")
    command.add_argument("--bytes", help='the coldest, down to so many bytes ("10GiB"); 0: all')
    command.add_argument("--older-than", metavar="TIME", help='stored before ("12h", "7d")')
    _add_realm(command, "of realms that begin so")
    command = _add(commands, "export", _export, "write blocks to a tar file")
    command.add_argument("file", type=Path, help="file to make")
    _add_realm(command, "only those of realms that begin so")
    command = _add(commands, "import", _import, "store the blocks of a tar file")
    command.add_argument("file", type=Path, help="file that export wrote")
    command.add_argument("--bytes", required=True, help="the most that the store may take")
    command = _add(
        commands,
        "bench",
        _bench,
        "speed of a store on a disk, against the disk and memory",
        folder="folder on that disk",
    )
    command.add_argument("--total", default="256MiB", help="bytes a measurement")
    stress = "kill a writer at random moments and check what it left"
    command = _add(commands, "stress", _stress, stress, folder="folder to make, and to remove afterwards")
    command.add_argument("--rounds", type=_at_least(1), default=25, help="how often (25)")
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("doctor", help="what tiers hold of a model, and whether they fit here")
    command.add_argument("--model", required=True, help="folder, or name in Hugging Face's cache")
    command.add_argument("--config", default="{}", metavar="JSON", help="kv_connector_extra_config")
    command.add_argument("--kv-cache-dtype", default="auto", help="as vLLM's option")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_doctor)


def run_command(options: argparse.Namespace) -> int:
    """Run a command, print its report, and return the exit code: 0; 1, something is wrong; 2, it could not be done."""
    try:
        report = options.run(options)
    except KVConnectorError as error:
        sys.stderr.write(f"npu-kv: {error}\n")
        if options.json:
            sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 2
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(json.dumps(report) + "\n" if options.json else "\n".join(_lines(report)) + "\n")
    wrong = [report.get(name) for name in ("damaged", "problems", "wrong", "missing")]
    return 1 if any(wrong) else 0


def _add(
    commands: Any, name: str, run: Any, text: str, *, folder: str = "folder of the store"
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    command.add_argument("path", type=Path, help=folder)
    command.add_argument("--json", action="store_true", help="print one JSON object, no progress")
    command.set_defaults(run=run)
    return command


def _add_realm(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--realm", type=_hex, default="", metavar="HEX", help=text)


def _hex(text: str) -> str:
    if re.fullmatch("[0-9a-fA-F]*", text) is None:
        msg = f"a realm is written in digits of base 16, not {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return text.lower()


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            msg = f"it must be a whole number of at least {least}, not {text!r}"
            raise argparse.ArgumentTypeError(msg)
        return int(text)

    return read


def _ls(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.stores import list_blocks

    return list_blocks(options.path, realm=options.realm, limit=options.limit)


def _stat(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.stores import summarize

    return summarize(options.path)


def _verify(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.stores import verify

    return verify(options.path, quiet=options.json)


def _scrub(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.stores import scrub

    return scrub(options.path, quiet=options.json)


def _gc(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.stores import collect

    if options.bytes is None and options.older_than is None and not options.realm:
        msg = "gc removes nothing by itself: name --bytes, --older-than or --realm"
        raise OptionError(msg)
    quota = None if options.bytes is None else _bytes(options.bytes)
    older_than = None if options.older_than is None else _seconds(options.older_than)
    return collect(options.path, quota=quota, older_than=older_than, realm=options.realm)


def _export(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.archive import export_blocks

    return export_blocks(options.path, options.file, realm=options.realm, quiet=options.json)


def _import(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.archive import import_blocks

    return import_blocks(options.file, options.path, quota=_bytes(options.bytes), quiet=options.json)


def _bench(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.bench import bench

    return bench(options.path, total=_bytes(options.total), quiet=options.json)


def _stress(options: argparse.Namespace) -> dict[str, Any]:
    import dataclasses

    from tqdm import tqdm

    from npu_kvconnector.commands.stress import Outcome, stress

    outcome = Outcome()
    rounds = stress(options.path, rounds=options.rounds, seed=options.seed)
    for outcome in tqdm(rounds, total=options.rounds, unit="kill", disable=options.json or None):  # noqa: B007
        pass
    return dataclasses.asdict(outcome)


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from npu_kvconnector.commands.doctor import diagnose

    return diagnose(options.model, options.config, kv_cache_dtype=options.kv_cache_dtype)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except OptionError as error:
        msg = f'a number of bytes is written as 1073741824 or "1GiB", not {text!r}'
        raise OptionError(msg) from error


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", text)
    if match is None:
        msg = f'a time is written as "90s", "30min", "12h" or "7d", not {text!r}'
        raise OptionError(msg)
    return float(match[1]) * _SECONDS[match[2]]


def _lines(report: dict[str, Any], indent: str = "") -> list[str]:
    """Return a report as text: a name and a value a line, rows of a list one a line."""
    lines = []
    for name, value in report.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        elif isinstance(value, list) and value:
            lines.append(f"{indent}{name}:")
            for row in value:
                text = "  ".join(f"{key}={_value(each)}" for key, each in row.items()) if isinstance(row, dict) else row
                lines.append(f"{indent}  {text}")
        else:
            lines.append(f"{indent}{name}: {_value(value)}")
    return lines


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) and value < 1e6 else str(value)
