"""Draws a record of the engines into its machine's page: ``python -m tests.benchmarks.draw docs/benchmarks/*/engine.json``.

Tables go between the marks of ``engine.md`` beside the record, plots into small SVG files beside that. Needs matplotlib, of
the workspace's group ``bench``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from tests.benchmarks import pages, results
from tests.benchmarks.bars import OUTSIDE as HOST_BAR
from tests.benchmarks.bars import cases_of, judged, tier_of
from tests.benchmarks.split import EXPERTS, GROUPS, OTHER, OUTSIDE

mpl.use("svg")
from matplotlib import pyplot as plt

# The same record gives the same file.
mpl.rcParams |= {"svg.hashsalt": "npu", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
PLOTS = {
    "decode-batch": ("batch", "tokens/s, context 64"),
    "decode-context": ("context (tokens)", "ms a step, batch 1"),
    "prefill": ("prompt (tokens)", "tokens/s"),
}


def main(files: list[str]) -> None:
    """Draw every record."""
    for file in map(Path, files):
        record = results.read(file)
        for name in PLOTS:
            plot(record, name, file.with_name(f"{file.stem}-{name}.svg"))
        page = file.with_suffix(".md")
        pages.insert(page, "figures", figures(record, file.stem), f"The engine on {record['machine']['processor']}")
        print(f"drawn: {page}")


def figures(record: dict[str, Any], stem: str) -> str:
    """Return everything on the page that is drawn."""
    plots = "\n".join(f"![{name}]({stem}-{name}.svg)" for name in PLOTS if points(record, name))
    return "\n\n".join(
        (
            measured(record, stem),
            plots,
            "## Figures\n\n" + table(record),
            "## Beside the bars\n\n" + bars(record),
            *(["## Where a step's time goes\n\n" + split(record)] if record.get("split") else []),
            "## What ran\n\n" + contestants(record),
        )
    )


def measured(record: dict[str, Any], stem: str) -> str:
    """Return what was measured, where and how, in a few sentences."""
    where, rounds = record["machine"], max(turn["round"] for turn in record["turns"])
    limits = [turn["limits"] for turn in record["turns"]]
    dram, fma = ([each[key] for each in limits] for key in ("dram_gb_s", "fma_gf_s"))
    loads = [turn["load"] for turn in record["turns"]]
    turns = (
        "all contestants up at once and asked in turns, case by case"
        if record.get("together")
        else "each a process a contestant"
    )
    return (
        f"Machine: {where['processor']}, {where['cores']} cores{' of a virtual machine' if where.get('virtual') else ''}, "
        f"{where['memory_gib']} GiB; our kernels ran in the tier **{tier_of(record) or 'none'}**. Between the turns it read "
        f"{min(dram):.0f} to {max(dram):.0f} GB/s (best of 1, 2, 4, 8 streams a thread) and multiplied {min(fma):.0f} to "
        f"{max(fma):.0f} GF/s in float32; load before a turn {min(loads):.1f} to {max(loads):.1f}. Measured {where['date']} UTC "
        f"at commit {where['commit']}: {rounds} round{'s' if rounds > 1 else ''}, {turns}, in ABBA order; "
        f"model: the shape of {record['shape']}, random weights. Every sample is in the "
        f"[record]({stem}.json)."
    )


def table(record: dict[str, Any]) -> str:
    """Return medians of the rounds with their least and most, a column a contestant."""
    labels = [one["label"] for one in record["contestants"].values()]
    lines = ["| what | " + " | ".join(labels) + " |", "|---" * (len(labels) + 1) + "|"]
    for case in cases_of(record):
        unit = "tok/s" if case.startswith("prefill") else "ms/step"
        cells = [cell(figure(record, name, case)) for name in record["contestants"]]
        lines.append(f"| {case} ({unit}) | " + " | ".join(cells) + " |")
    for caches in ("cold", "warm"):
        cells = [cell(start(record, name, caches)) for name in record["contestants"]]
        lines.append(f"| start to first token, compiler's caches {caches} (s) | " + " | ".join(cells) + " |")
    memory = [
        max((turn["memory_gib"] for turn in results.turns_of(record, name)), default=0.0)
        for name in record["contestants"]
    ]
    lines.append("| peak memory of all processes (GiB) | " + " | ".join(f"{each:.1f}" for each in memory) + " |")
    filled = (  # early records had all their contexts computed
        f" Contexts of more than {record['filled_above']} tokens were not computed but filled, by vLLM's DecodeBenchConnector; "
        "llama.cpp computes them, up to 8192 tokens."
        if "filled_above" in record
        else ""
    )
    return (
        "\n".join(lines) + "\n\nMedian of the rounds (least to most); a round's figure is the median of its samples. "
        "llama.cpp's steps are the mean of one generation a round, and its prompts pass no sampler; its start is that of "
        "`llama-bench` with one prompt of 16 tokens." + filled
    )


def figure(record: dict[str, Any], contestant: str, case: str) -> results.Spread | None:
    """Return a case in the unit that the table shows."""
    seconds = results.seconds(record, contestant, case)
    if seconds is None:
        return None
    return seconds.rate(float(case.split()[1])) if case.startswith("prefill") else seconds.times(1e3)


def start(record: dict[str, Any], contestant: str, caches: str) -> results.Spread | None:
    """Return the seconds to the first token of turns with such caches."""
    took = [[turn["first_token_s"]] for turn in results.turns_of(record, contestant) if turn["caches"] == caches]
    return results.spread(took) if took else None


def cell(spread: results.Spread | None) -> str:
    """Return a figure with its spread."""
    if spread is None:
        return "-"
    digits = 0 if spread.median >= 100 else 1
    if spread.rounds == 1:
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} ({spread.least:.{digits}f} to {spread.most:.{digits}f})"


def bars(record: dict[str, Any]) -> str:
    """Return every bar, the missed ones first."""
    lines = ["| what | bar | measured | |", "|---|---|---|---|"]
    lines += (
        f"| {bar.what} | {bar.goal} | {bar.measured} | {'met' if bar.met else '**missed**'} |"
        for bar in sorted(judged(record), key=lambda bar: bar.met)
    )
    return "\n".join(lines)


def split(record: dict[str, Any]) -> str:
    """Return the share of each group of kernels in our steps; a column of experts where a model has some."""
    shares = {case: grouped(one) for case, one in record["split"].items()}
    shown = [
        group for group in (*GROUPS, OTHER, OUTSIDE) if group != EXPERTS or any(one[group] for one in shares.values())
    ]
    lines = ["| step | ms | " + " | ".join(shown) + " |", "|---" * (len(shown) + 2) + "|"]
    for case, one in record["split"].items():
        cells = (f"{shares[case][group]:.0%}" for group in shown)
        lines.append(f"| {case} | {one['wall_ms']:.1f} | " + " | ".join(cells) + " |")
    return (
        "\n".join(lines)
        + "\n\nKernels by vLLM's profiler, in a run of its own; the whole is a step's wall time without the profiler, so "
        f"what is outside kernels (bar: {HOST_BAR:.0%}) is the rest."
    )


def grouped(one: dict[str, Any]) -> dict[str, float]:
    """Return the share of each group in a step's wall time; all together are 1."""
    shares = dict.fromkeys((*GROUPS, OTHER), 0.0)
    for kernel, ms in one["kernels_ms"].items():
        group = next((group for group, words in GROUPS.items() if any(word in kernel.lower() for word in words)), OTHER)
        shares[group] += ms / one["wall_ms"]
    return shares | {OUTSIDE: 1 - sum(shares.values())}


def contestants(record: dict[str, Any]) -> str:
    """Return how each contestant was started."""
    lines = []
    for name, one in record["contestants"].items():
        turns = results.turns_of(record, name)
        versions = ", ".join(f"{key} {value}" for key, value in turns[0]["versions"].items()) if turns else "no figures"
        if name in record["failures"]:
            versions += f"; **failed** after {len(turns)} rounds: {record['failures'][name]}"
        environ = " ".join(f"{key}={value}" for key, value in one["environ"].items())
        ran = turns[0].get("commands") if turns else None
        commands = [f"    `{command}`" for command in ran or [f"{environ} {one['command']}".strip()]]
        lines.append(f"- {one['label']}: {versions}\n\n" + "\n".join(commands))
    return "\n".join(lines)


def plot(record: dict[str, Any], name: str, file: Path) -> None:
    """Draw one line a contestant, with the rounds' least and most; nothing where no contestant has two points."""
    lines = points(record, name)
    file.unlink(missing_ok=True)
    if not lines:
        return
    across, up = PLOTS[name]
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for label, line in lines.items():
        x = [each for each, _ in line]
        axes.plot(x, [spread.median for _, spread in line], marker="o", markersize=3, linewidth=1.2, label=label)
        axes.fill_between(x, [s.least for _, s in line], [s.most for _, s in line], alpha=0.15)
    axes.set(xlabel=across, ylabel=up, xscale="log", ylim=(0, None))
    ticks = sorted({x for line in lines.values() for x, _ in line})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def points(record: dict[str, Any], name: str) -> dict[str, list[tuple[int, results.Spread]]]:
    """Return each contestant's line: where it is measured, and the figure."""
    lines: dict[str, list[tuple[int, results.Spread]]] = {}
    for contestant, one in record["contestants"].items():
        for case in cases_of(record):
            at, seconds = place(name, case), results.seconds(record, contestant, case)
            if at is not None and seconds is not None:
                shown = figure(record, contestant, case) if name != "decode-batch" else seconds.rate(at)
                assert shown is not None
                lines.setdefault(one["label"], []).append((at, shown))
    return {label: sorted(line, key=lambda point: point[0]) for label, line in lines.items() if len(line) > 1}


def place(name: str, case: str) -> int | None:
    """Return where a case stands on a plot's axis; None where it is none of its cases."""
    words = case.split()
    if name == "prefill":
        return int(words[1]) if words[0] == "prefill" else None
    if words[0] != "decode":
        return None
    batch, context = int(words[2]), int(words[4])
    if name == "decode-batch":
        return batch if context == 64 else None
    return context if batch == 1 else None


if __name__ == "__main__":
    main(sys.argv[1:])
