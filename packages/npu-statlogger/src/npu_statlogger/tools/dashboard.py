"""`npu-stat dashboard`: the Grafana dashboard and the Prometheus alert rules that come with this package."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from npu_statlogger.tools.arguments import write_text

if TYPE_CHECKING:
    from npu_statlogger.tools.arguments import Commands

__all__ = ["ASSETS", "add", "text_of"]

ASSETS = {"grafana": "grafana.json", "alerts": "alerts.yml"}


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("dashboard", help="print the Grafana dashboard or the Prometheus alert rules")
    parser.add_argument("what", choices=ASSETS, help="grafana: JSON to import; alerts: a file for rule_files")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="write to a file")
    parser.set_defaults(run=_run)


def text_of(what: str) -> str:
    """Return the text of one of ASSETS."""
    return files(__package__).joinpath("assets", ASSETS[what]).read_text(encoding="utf-8")


def _run(options: argparse.Namespace) -> int:
    if options.output:
        write_text(options.output, text_of(options.what))
    else:
        sys.stdout.write(text_of(options.what))
    return 0
