"""Writes docs/reference/statistics.md from npu-statlogger's table of figures and the classes of its lines.

python -m tests.support.statistics_page > docs/reference/statistics.md
"""

from __future__ import annotations

import ast
import inspect
import sys
from typing import TYPE_CHECKING

from npu_statlogger import lines
from npu_statlogger.metrics import Kind, metrics
from npu_statlogger.sketch import LARGEST, RELATIVE_ERROR, SMALLEST

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = f"""# Fields of the statistics

What stands in the files of `npu-statlogger`, schema `npu-statlogger/2`. [Statistics](../user_guide/statistics.md) says how to
get and read them. Made from the package's own table by `python -m tests.support.statistics_page`.

A file holds one JSON object a line. `schema` and `kind` are the first keys of each:

| kind | one line per |
|---|---|
| `interval` | engine and interval with traffic: all figures of that time; one more for what belongs to no engine |
| `request` | finished request, if sampled ([setting](../user_guide/statistics_places.md#requests-and-steps) `requests`) |
| `step` | engine step, if sampled (`steps`) |
| `run` | process and file, at its head |
| `note` | thing that a reader of the figures should know |

Lines of schema `npu-statlogger/1` are interval lines without `kind`; readers give their figures today's names. A reader leaves
out keys that it does not know. Seconds since the epoch are of the front end's clock. No line holds a prompt or an answer.

## Interval lines

| key | content |
|---|---|
| `start`, `end` | span, in seconds since the epoch |
| `processes` | `host:pid` of the writers |
| `models`, `engines` | names as served; indexes of the data-parallel engines, none for what belongs to no engine |
| `rates` | what follows from the counters, `null` where there is nothing to divide by; readers work it out anew |
| `counters` | whole numbers of this span alone: lines add up, over engines, processes, files and restarts |
| `totals_nano` | the same for sums that are no whole numbers (a connector's seconds), in 1e-9 of their unit |
| `gauges` | engine (`""`: none) -> name -> `[time, value]`, the latest value |
| `distributions` | name -> `count`, `sum_nano` (of values rounded to 1e-9), `min`, `max`, `zero` (values below {SMALLEST:g}), `buckets` (`[i, count]`), and for readers of the bare line `mean`, `p50`, `p90`, `p99`, `p99.9` |

Bucket i holds the values in (g^(i-1), g^i], g = (1 + e) / (1 - e), e = {RELATIVE_ERROR}. A quantile is within {RELATIVE_ERROR:.0%} of the value at its
nearest rank, ceil(q * count), for values from {SMALLEST:g} to {LARGEST:g}; count, minimum and maximum are exact. Merging adds integers:
the merge of any parts in any order is the very distribution of all values.

A figure that vLLM exports to Prometheus has the name of that metric (without `vllm:` and `_total`) and its meaning;
"own" marks the others. The value of a label follows a dot: `request_success.length`.
"""
_CONNECTORS = """
### Of connectors

`SchedulerStats.kv_connector_stats` and `.ec_connector_stats` hold what the connector in use measures. The offloading connectors'
figures have the names of vLLM's metrics, with the tier or other labels behind the dot: `kv_offload_load_bytes`,
`kv_offload_load_time` (a total), `kv_offload_load_size`, `kv_offload_store_*`, `kv_offload_cpu_cache_usage_perc`,
`kv_offload_tiering_read_bytes.fs`, and so on; so have NIXL's (`nixl_xfer_time_seconds`, `nixl_num_failed_transfers`). Observations of
other connectors become distributions `kv_connector_<name>` or `ec_connector_<name>`.
"""
_TITLES = {Kind.COUNTER: "Counters", Kind.GAUGE: "Gauges", Kind.DISTRIBUTION: "Distributions"}


def text() -> str:
    """Return the page."""
    return "".join([_HEAD, *(row for kind in Kind for row in _figures(kind)), _CONNECTORS, *_kinds()])


def _figures(kind: Kind) -> Iterator[str]:
    yield f"\n### {_TITLES[kind]}\n\n| name | unit | meaning | from vLLM's |\n|---|---|---|---|\n"
    for metric in metrics():
        if metric.kind is kind:
            name = f"`{metric.name}{f'.<{metric.label}>' if metric.label else ''}`{' (own)' if metric.own else ''}"
            needs = f"; needs `{metric.needs}`" if metric.needs else ""
            sources = ", ".join(f"`{source}`" for source in metric.sources) or "own count"
            yield f"| {name} | {metric.unit} | {metric.meaning}{needs} | {sources} |\n"


def _kinds() -> Iterator[str]:
    tree = ast.parse(inspect.getsource(lines))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for kind, cls in lines.KINDS.items():
        yield f"\n## {kind.capitalize()} lines\n\n{ast.get_docstring(classes[cls.__name__])}\n\n| key | type | meaning |\n|---|---|---|\n"
        for name in ("_Line", cls.__name__):
            yield from _keys(classes[name])


def _keys(cls: ast.ClassDef) -> Iterator[str]:
    """Yield a row for each field; the string below a field is its meaning."""
    for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "kind":
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            meaning = " ".join(str(after.value.value).split()) if documented else node.target.id.replace("_", " ")
            yield f"| `{node.target.id}` | {ast.unparse(node.annotation)} | {meaning} |\n"


if __name__ == "__main__":
    sys.stdout.write(text())
