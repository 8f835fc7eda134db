"""The command ``npu-kv``: whether vLLM knows the connector, what a configuration would do, stores of blocks."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
from typing import Any, ClassVar, NoReturn

from npu_kvconnector import CONNECTOR, register
from npu_kvconnector.commands.arguments import arguments_of_stores, run_command
from npu_kvconnector.commands.tiers import tier_problems
from npu_kvconnector.config import OffloadConfig
from npu_kvconnector.errors import OptionError

__all__ = ["check", "main"]

_PLUGIN = "npu_kvconnector"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: all is well; 1: something is wrong, such as damage; 2: a wrong command line (by argparse), or a store or file
    that cannot be used; 130: interrupted; 141: the reader of the output has
    gone, as after `npu-kv check | head`.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on; what the interpreter flushes when it exits must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell reports a program that SIGPIPE has ended


def check(config: str) -> dict[str, Any]:
    """Return versions, the effective options, the ``--kv-transfer-config`` to use, and the problems found."""
    problems: list[str] = []
    report: dict[str, Any] = {
        "connector": CONNECTOR,
        "npu-kvconnector": importlib.metadata.version("npu-kvconnector"),
        "torch": importlib.metadata.version("torch"),
        "vllm": _check_vllm(problems),
        "problems": problems,
    }
    try:
        extra_config = json.loads(config)
        options = OffloadConfig.parse(extra_config)
        report["options"] = _effective(options)
        problems += [f"--config: {problem}" for problem in tier_problems(options)]
        transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
        if extra_config:
            transfer["kv_connector_extra_config"] = extra_config
        report["kv_transfer_config"] = transfer
    except (OptionError, ValueError, TypeError, AttributeError) as error:
        problems.append(f"--config: {error}")
    return report


def _effective(options: OffloadConfig) -> dict[str, Any]:
    """Return the options as they are taken: `blocks_per_chunk` is 1 where nothing says otherwise."""
    effective = dataclasses.asdict(options)
    if options.block_size is None:
        effective["blocks_per_chunk"] = options.blocks_per_chunk or 1
    return effective


class _Parser(argparse.ArgumentParser):
    """Says in JSON, too, what is wrong with a command line that asks for JSON."""

    is_json: ClassVar[bool] = False

    def error(self, message: str) -> NoReturn:
        if self.is_json:
            sys.stdout.write(json.dumps({"error": message}) + "\n")
        super().error(message)


def _run(arguments: list[str] | None) -> int:
    _Parser.is_json = "--json" in (sys.argv if arguments is None else arguments)
    parser = _Parser(prog="npu-kv", description="KV blocks beside the device: tiers, stores, checks.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("check", help="what is registered, and what a configuration would do")
    command.add_argument("--config", default="{}", metavar="JSON", help="kv_connector_extra_config to check")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=None)
    arguments_of_stores(commands)
    options = parser.parse_args(arguments)
    if options.run is not None:
        return run_command(options)
    report = check(options.config)
    sys.stdout.write(json.dumps(report) + "\n" if options.json else _as_text(report))
    return 1 if report["problems"] else 0


def _check_vllm(problems: list[str]) -> str | None:
    """Return vLLM's version; name what keeps it from knowing the connector."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        problems.append(f"VLLM_PLUGINS={allowed} leaves this plugin out; set VLLM_PLUGINS={allowed},{_PLUGIN}")
    try:
        import vllm
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        problems.append(f"vLLM cannot be imported ({error}); install npu-kvconnector[vllm], or a build of your own")
        return None
    register()
    try:
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except (ImportError, ValueError) as error:
        problems.append(f"vLLM {vllm.__version__} does not take the connector, 0.32 or 0.33 is needed: {error}")
    return str(vllm.__version__)


def _as_text(report: dict[str, Any]) -> str:
    lines = [f"{name}: {report[name] or 'not found'}" for name in ("connector", "npu-kvconnector", "torch", "vllm")]
    lines += [f"  {name} = {value}" for name, value in report.get("options", {}).items() if value is not None]
    if "kv_transfer_config" in report:
        lines.append(f"use: --kv-transfer-config '{json.dumps(report['kv_transfer_config'])}'")
    lines += [f"problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
