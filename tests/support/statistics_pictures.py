"""Makes the pictures of docs/user_guide/statistics.md from two recorded runs, with the tool itself.

``python -m tests.support.statistics_pictures LINES BEFORE AFTER`` takes a file of lines, and two files for `diff`, of
which the first stands beside the lines too if it is a result of `vllm bench serve`. The page is photographed by
chromium (apt: chromium).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from tests.support.environments import ROOT

__all__ = ["main"]

IMAGES = ROOT / "docs" / "user_guide" / "images"
WIDTH, HEIGHT = 1280, 1672
COLUMNS = 116


def main(lines: str, before: str, after: str) -> None:
    """Write the pictures."""
    IMAGES.mkdir(exist_ok=True)
    npu_stat("top", lines, "--window", "3min", "--svg", str(IMAGES / "statistics_top.svg"))
    terminal("npu-stat diff before.json after.json", npu_stat("diff", before, after), IMAGES / "statistics_diff.svg")
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "report.html", Path(folder) / "report.png"
        npu_stat("report", lines, before, "--html", str(page))
        browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        browser += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(browser, check=True, capture_output=True)
        Image.open(picture).convert("RGB").quantize(96).save(IMAGES / "statistics_report.png", optimize=True)


def npu_stat(*arguments: str) -> str:
    command = [str(Path(sys.prefix) / "bin" / "npu-stat"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def terminal(title: str, text: str, path: Path) -> None:
    """Draw what a command printed as a terminal would show it."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    shown = Text("\n".join(text.splitlines()[3:]))
    shown.highlight_words(["worse"], "red")
    shown.highlight_words(["better"], "green")
    console.print(shown)
    path.write_text(re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL))


if __name__ == "__main__":
    main(*sys.argv[1:])
