"""The goals of the engine by tier, from the design, and which of them a record misses."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.benchmarks import results, rounded
from tests.benchmarks.engine_cases import ONE_STEP, SHAPES, has_experts, weight_bytes

# By the kernels' tier: how many times the best peer, for each case.
TIMES = {
    "avx512_bf16": {
        "decode batch 1 context 64": 1.3,
        "decode batch 8 context 64": 1.5,
        "decode batch 32 context 64": 1.6,
        "prefill 512": 1.3,
        "prefill 2048": 1.5,
    },
    "amx": {
        "decode batch 1 context 64": 1.5,
        "decode batch 8 context 64": 1.6,
        "decode batch 32 context 64": 1.6,
        "prefill 512": 1.8,
        "prefill 2048": 1.8,
        "prefill 4096": 1.8,
    },
}
OTHERWISE = 1.3  # of every case, on a processor that has none of these
START = {"avx512_bf16": 12.0}  # seconds
START_OTHERWISE = 15.0
OF_MEMORY = 0.85  # of what the machine reads, by a decode step of one sequence
FOUR_BITS = {"decode batch 1 context 64": 12, "decode batch 8 context 64": 25, "decode batch 32 context 64": 50}
"""Milliseconds of a step with weights of 4 bits, of a processor that reads 45 GB/s and multiplies 1,000 GF/s in bfloat16."""
OUTSIDE = 0.05  # of a decode step, outside kernels


@dataclass(frozen=True)
class Bar:
    """A goal, what was measured, and whether that is enough."""

    what: str
    goal: str
    measured: str
    met: bool


def judged(record: dict[str, Any]) -> list[Bar]:
    """Return every goal that the record can be judged by."""
    tier = tier_of(record)
    if has_experts(SHAPES.get(record.get("shape"), {})):
        return [*not_slower(record), *of_memory(record)]
    if record.get("weights") in rounded.NAMES:
        return not_slower(record)
    return [*starts(record, tier), *beside_peers(record, tier), *of_memory(record), *outside_kernels(record)]


def not_slower(record: dict[str, Any]) -> list[Bar]:
    """Return the bars of what has no multiples for goals: prompts and steps beside the best peer and, with weights of 4 bits, of steps."""
    bars, steps = [], FOUR_BITS if record["weights"] == rounded.NAME else {}
    for case in cases_of(record):
        ours, best = results.seconds(record, "npu", case), best_peer(record, case)
        if ours and case in steps:
            took = ours.median * 1e3
            bars.append(Bar(case, f"{steps[case]} ms at most", f"{took:.1f} ms", took <= steps[case]))
        if best:
            peer, times = best
            bars.append(Bar(case, "not slower than the best peer", f"{times:.2f}x {peer}", times >= 1))
    return bars


def tier_of(record: dict[str, Any]) -> str:
    """Return the instruction set of our kernels; empty where we did not run."""
    ours = results.turns_of(record, "npu")
    return ours[0]["versions"].get("tier", "") if ours else ""


def starts(record: dict[str, Any], tier: str) -> list[Bar]:
    """Return the bar of the first token, which is of warm caches; of cold ones where a single round has no others."""
    turns, bar = results.turns_of(record, "npu"), START.get(tier, START_OTHERWISE)
    if not turns:
        return []
    caches = "warm" if any(turn["caches"] == "warm" for turn in turns) else "cold"
    took = median(turn["first_token_s"] for turn in turns if turn["caches"] == caches)
    what = f"process start to first token, caches {caches}"
    return [Bar(what, f"{bar:.0f} s at most", f"{took:.1f} s", took <= bar)]


def beside_peers(record: dict[str, Any], tier: str) -> list[Bar]:
    """Return the bars that are multiples of the best peer's figure."""
    bars = []
    for case in cases_of(record):
        goal = TIMES.get(tier, {}).get(case, None if tier in TIMES else OTHERWISE)
        best = best_peer(record, case)
        if goal and best:
            peer, times = best
            bars.append(Bar(case, f"{goal}x the best peer", f"{times:.2f}x {peer}", times >= goal))
    return bars


def best_peer(record: dict[str, Any], case: str) -> tuple[str, float] | None:
    """Return the label of the fastest other contestant, and how many times as fast as it ours is."""
    peers = [
        (one["label"], times)
        for name, one in record["contestants"].items()
        if not name.startswith("npu") and (times := times_as_fast(record, name, case))
    ]
    return min(peers, key=lambda pair: pair[1], default=None)


def times_as_fast(record: dict[str, Any], peer: str, case: str) -> float | None:
    """Return a peer's seconds over ours, None without both; where all were up at once, the median over the rounds."""
    ours, theirs = (results.seconds(record, name, case) for name in ("npu", peer))
    if ours is None or theirs is None:
        return None
    if not record.get("together"):
        return theirs.median / ours.median
    rounds: dict[int, dict[str, float]] = {}
    for turn in record["turns"]:
        if turn["contestant"] in ("npu", peer) and case in turn["seconds"]:
            rounds.setdefault(turn["round"], {})[turn["contestant"]] = median(turn["seconds"][case])
    ratios = [found[peer] / found["npu"] for found in rounds.values() if len(found) > 1]
    return median(ratios) if ratios else None


def of_memory(record: dict[str, Any]) -> list[Bar]:
    """Return the bars of a single sequence's step, which reads all weights once, beside what the machine reads.

    The best moment before our turns: neighbours on a shared machine halve its memory for minutes, so the best of the run's other turns
    is no limit of ours. And, where all contestants were up at once, medians of the seconds before and after the steps, as the step's is one.
    """
    step = results.seconds(record, "npu", ONE_STEP)
    if step is None:
        return []
    read = weight_bytes(SHAPES[record["shape"]]) / step.median / 1e9
    turns = results.turns_of(record, "npu")
    limits = {"before": median(turn["limits"]["dram_gb_s"] for turn in turns)}
    if beside := [each for turn in turns for each in turn.get("memory_beside", [])]:
        limits["beside, median"] = median(beside)
    return [
        Bar(
            "weights read in a step, batch 1",
            f"{OF_MEMORY:.0%} of the memory {when}",
            f"{read:.1f} of {limit:.1f} GB/s: {read / limit:.0%}",
            read >= OF_MEMORY * limit,
        )
        for when, limit in limits.items()
    ]


def outside_kernels(record: dict[str, Any]) -> list[Bar]:
    """Return the bar of the host's share of a decode step."""
    bars = []
    for case, split in record.get("split", {}).items():
        if case.startswith("decode"):
            outside = 1 - sum(split["kernels_ms"].values()) / split["wall_ms"]
            bars.append(Bar(f"outside kernels, {case}", f"{OUTSIDE:.0%} at most", f"{outside:.0%}", outside <= OUTSIDE))
    return bars


def cases_of(record: dict[str, Any]) -> list[str]:
    """Return the names of the cases that anybody ran, in their order."""
    return list(dict.fromkeys(case for turn in record["turns"] for case in turn["seconds"]))
