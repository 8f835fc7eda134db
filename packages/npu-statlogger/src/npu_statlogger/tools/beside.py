"""What `vllm bench serve` measured beside what the server did in the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import bench, names
from npu_statlogger.tools.text import duration, figure, number

if TYPE_CHECKING:
    from npu_statlogger.tools.page import Section

__all__ = ["Client", "beside"]

_NAMES = {"ttft": names.TTFT, "tpot": names.TPOT, "itl": names.ITL, "e2el": names.E2E}
"""Name in a result of `vllm bench serve` -> ours."""

_RANKS = {"median": 0.5, "p90": 0.9, "p99": 0.99}
_SLACK = 2.0
"""Seconds by which a line may lie outside of the client's run: a result says its end in whole seconds."""


class Client:
    """One result, and the server's figures from the lines of the same time."""

    def __init__(self, result: dict[str, Any]) -> None:
        """Take a result. Raises InputError if it does not say when it was."""
        self.result = result
        self.server = Snapshot()
        self._start, self._end = bench.span_of(result)

    def add(self, line: Snapshot) -> None:
        """Take in a line of the server if it is of the same time."""
        if self._start - _SLACK <= (line.start + line.end) / 2 <= self._end + _SLACK:
            self.server.merge(line)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return what it measured, as rows of name, client and server."""
        rows = []
        for name, cuts in bench.client_percentiles(self.result).items():
            for cut, value in cuts.items():
                rows.append((f"{names.label(_NAMES[name])}, {cut}", duration(value), self._server(_NAMES[name], cut)))
        client, server = self.result.get("output_throughput"), self.server.rates()["generation_tokens_per_second"]
        rows.append(("tokens generated", figure("_per_second", client), figure("_per_second", server)))
        ours = number(self.server.counters[names.GENERATED]) if self.server.engines else "-"
        rows.append(("tokens generated in all", number(self.result.get("total_output_tokens", 0)), ours))
        return rows

    def _server(self, name: str, cut: str) -> str:
        sketch = self.server.distributions.get(name)
        if sketch is None:
            return "-"
        return figure(name, sketch.quantile(_RANKS[cut]) if cut in _RANKS else sketch.mean)


def beside(clients: Sequence[Client]) -> Section:
    """Return a table of all clients; without lines of a server its column is empty."""
    rows = []
    for index, client in enumerate(clients, start=1):
        run = f"run {index}: " if len(clients) > 1 else ""
        rows += [(f"{run}{name}", ours, theirs) for name, ours, theirs in client.rows()]
    return "vllm bench serve beside the server, in the same time", ("", "client", "server"), rows
