"""Where a step's time goes: kernels of the npu by name, by vLLM's own profiler, beside the step's wall time without it."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.benchmarks.engine_cases import Case
    from tests.benchmarks.engine_contestant import Timer

# What the tables add up; the first word that a kernel's name contains decides.
EXPERTS = "experts"
GROUPS = {
    "linear layers": ("linear", "mm", "matmul"),
    EXPERTS: ("experts",),
    "attention and its cache": ("attention", "reshape_and_cache", "cache"),
    "norms, rotation, activation": ("norm", "rotary", "silu", "gelu"),
    "sampling": ("argmax", "top_k", "top_p", "sample", "exponential", "softmax"),
}
ATTENTION = "npu_ops::paged_attention"
OTHER, OUTSIDE = "other kernels", "outside kernels"


def split_of_steps(llm: Any, timer: Timer, folder: Path, cases: list[Case], layers: int) -> dict[str, dict[str, Any]]:
    """Return for each case the wall time of a step or prefill without the profiler, and milliseconds a kernel with it."""
    result = {}
    for case in cases:
        samples = timer.measured(case)
        before = set(folder.glob("*.json.gz"))
        llm.start_profile()
        timer.run(case.batch, case.context, case.steps, case.whole_steps)
        llm.stop_profile()
        (trace,) = set(folder.glob("*.json.gz")) - before
        # before and after, so that a machine that becomes slower or faster meanwhile does not move the share of the host
        wall = statistics.median(samples + timer.measured(case))
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        steps = 0 if case.kind == "prefill" else case.samples
        result[case.name] = {"wall_ms": wall * 1e3, "kernels_ms": kernels_of(events, layers, steps)}
    return result


def kernels_of(events: list[dict[str, Any]], layers: int, steps: int) -> dict[str, float]:
    """Return milliseconds by kernel of one of the last steps, or of the whole trace for 0.

    A step attends once a layer, so from the first layer's attention of one step to that of a later one lie whole steps.
    """
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    if steps:
        attends = [event["ts"] for event in kernels if event["name"] == ATTENTION]
        first, last = attends[-(steps + 1) * layers], attends[-layers]
        kernels = [event for event in kernels if first <= event["ts"] < last]
    total: Counter[str] = Counter()
    for event in kernels:
        total[event["name"]] += event["dur"] / 1e3 / max(1, steps)
    return dict(total)
