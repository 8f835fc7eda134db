"""Draws the record of :mod:`tests.benchmarks.scale`: ``python -m tests.benchmarks.scale_draw docs/benchmarks/*/scale.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from tests.benchmarks import pages

mpl.use("svg")
from matplotlib import pyplot as plt

mpl.rcParams |= {"svg.hashsalt": "npu", "svg.fonttype": "none", "font.size": 9}
PARTS = ("scheduler", "collectives", "the rest of a rank", "between engine and ranks")


def main(files: list[str]) -> None:
    """Draw every record."""
    for file in map(Path, files):
        record = json.loads(file.read_text())
        plot(record["runs"], file.with_suffix(".svg"))
        pages.insert(file.with_suffix(".md"), "scale", text(record, file.stem), "Many ranks on the null device")
        print(f"drawn: {file.with_suffix('.md')}")


def parts(run: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a step by part, of which none waits for another."""
    step = run["step"]
    inside = min(step["collectives"], step["rank wall"])
    own = step["rank wall"] - inside
    rest = max(0.0, step["wall"] - step["scheduler wall"] - step["rank wall"])
    return dict(zip(PARTS, (step["scheduler wall"], inside, own, rest), strict=True))


def text(record: dict[str, Any], stem: str) -> str:
    """Return what is on the page."""
    where = record["machine"]
    lines = [
        (
            f"Machine: {where['processor']}, {where['cores']} cores, {where['memory_gib']} GiB. Measured {where['date']} UTC at commit "
            f"{where['commit']} by `nox -s bench -- scale`: a Llama of 8 layers with dummy weights on the null device, whose kernels "
            "take 5 us each; every process is a fork of one that has imported vLLM. All requests came at once, 256 a replica at a time."
        ),
        "",
        f"![a step's parts]({stem}.svg)",
        "",
        (
            "| ranks | TP, PP, DP | start (s) | memory of all (GiB) | a rank's own (MiB) | requests x tokens | answered in (s) | "
            "steps of a replica | stop (s), processes left |"
        ),
        "|---" * 9 + "|",
        *(started(run) for run in record["runs"]),
        "",
        "A step, medians in ms:",
        "",
        "| ranks | step | " + " | ".join(PARTS) + " | processor time of the scheduler | of a rank |",
        "|---" * (len(PARTS) + 4) + "|",
        *(stepped(run) for run in record["runs"]),
    ]
    return "\n".join(lines)


def ranks(run: dict[str, Any]) -> int:
    """Return how many a run had."""
    return int(run["tp"] * run["pp"] * run["dp"])


def started(run: dict[str, Any]) -> str:
    """Return a row of the engines."""
    memory = run["memory_after_mib"]
    cells = (
        ranks(run),
        f"{run['tp']}, {run['pp']}, {run['dp']}",
        f"{run['start_s']:.0f}",
        f"{memory['all'] / 1024:.1f}",
        f"{memory['rank']:.0f}",
        f"{run['requests']} x {run['tokens']}",
        f"{run['answer_s']:.1f}",
        f"{run['step']['number']:.0f}",
        f"{run['stop_s']:.1f}, {run['left']}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def stepped(run: dict[str, Any]) -> str:
    """Return a row of the steps."""
    step = run["step"]
    figures = [step["wall"], *parts(run).values(), step["scheduler cpu"], step["rank cpu"]]
    return f"| {ranks(run)} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """Draw the share of each part in a step over ranks."""
    x = [ranks(run) for run in runs]
    whole = [sum(parts(run).values()) for run in runs]
    shares = [[100 * parts(run)[part] / total for run, total in zip(runs, whole, strict=True)] for part in PARTS]
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.stackplot(x, shares, labels=PARTS, alpha=0.8)
    axes.set(xlabel="ranks", ylabel="% of a step", xscale="log", ylim=(0, 100), xlim=(min(x), max(x)))
    axes.set_xticks(x, [str(number) for number in x])
    axes.minorticks_off()
    axes.legend(loc="lower left", fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
