"""Results of `vllm bench serve --save-result`, so that every command takes them beside npu-statlogger's lines.

With `--save-detailed` a result holds each request's times: these become distributions, in as many snapshots as the
run had seconds. Without it there are counters, end-to-end times and the client's own percentiles, which do not merge.

A result says when it ended only to the second and in the client's local time; start and end follow from that.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import TYPE_CHECKING, Any

from npu_statlogger.errors import InputError
from npu_statlogger.fold import Batch
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.client import ERROR, ClientSpans
from npu_statlogger.tools.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["client_percentiles", "is_result", "read_requests", "read_results", "read_snapshots", "span_of"]

_OPENING = 1 << 10
_MARK = b'"endpoint_type"'
"""A key that a result has near its start and a line of npu-statlogger never has."""

_SPANS = 240
"""Snapshots at most for a result."""

_TIMES = ("ttft", "tpot", "itl", "e2el")
_CUTS = ("mean", "median", "p90", "p99")


def is_result(file: Path) -> bool:
    """Tell whether a file begins as a result of `vllm bench serve` does.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        return _MARK in opened.read(_OPENING)


def read_results(file: Path) -> Iterator[dict[str, Any]]:
    """Yield each result in a file; `--append-result` puts several into one.

    Raises:
        InputError: the file holds something else.
        OSError: the file cannot be read.
    """
    text, decoder, begin = file.read_text(), json.JSONDecoder(), 0
    while begin < len(text.rstrip()):
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        try:
            result, begin = decoder.raw_decode(text, begin)
        except ValueError as error:
            msg = f"cannot read {file} as a result of `vllm bench serve`: {error}."
            raise InputError(msg) from error
        yield result


def read_snapshots(file: Path) -> Iterator[Snapshot]:
    """Yield what the client saw, a snapshot each second or so with the requests that ended in it.

    Raises:
        InputError: the file holds something else.
        OSError: the file cannot be read.
    """
    for result in read_results(file):
        try:
            yield from _snapshots(result)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            msg = f"cannot read {file} as a result of `vllm bench serve`: a field is missing or wrong ({error!r})."
            raise InputError(msg) from error


def read_requests(file: Path) -> Iterator[Request]:
    """Yield the requests of each result that was saved with `--save-detailed`, failed ones too.

    Raises:
        InputError: a result was saved without.
        OSError: the file cannot be read.
    """
    for result in read_results(file):
        if "ttfts" not in result:
            msg = f"{file} holds no times of single requests; save it with `vllm bench serve --save-detailed`."
            raise InputError(msg)
        yield from _requests(result)


def client_percentiles(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the client's own figures in seconds, as {"ttft": {"mean": 0.1, "median": ...}, ...}."""
    found = {
        name: {cut: result[f"{cut}_{name}_ms"] / 1000 for cut in _CUTS if f"{cut}_{name}_ms" in result}
        for name in _TIMES
    }
    return {name: cuts for name, cuts in found.items() if cuts}


def span_of(result: dict[str, Any]) -> tuple[float, float]:
    """Return when a run began and ended, in seconds since the epoch.

    Raises:
        InputError: the result does not say.
    """
    try:
        end = datetime.strptime(result["date"], "%Y%m%d-%H%M%S").astimezone().timestamp()
        return end - float(result["duration"]), end
    except (KeyError, TypeError, ValueError) as error:
        msg = f"cannot read a result of `vllm bench serve`: a field is missing or wrong ({error!r})."
        raise InputError(msg) from error


def _snapshots(result: dict[str, Any]) -> Iterator[Snapshot]:
    begin, end = span_of(result)
    model, process = str(result["model_id"]), f"vllm bench serve {result['date']}"
    batch = Batch()
    counts = {
        names.DRAFTED: result.get("spec_decode_draft_tokens", 0),
        names.ACCEPTED: result.get("spec_decode_accepted_tokens", 0),
        names.DRAFTS: result.get("spec_decode_num_drafts", 0),
    }
    length = max(1.0, (end - begin) / _SPANS)
    if "ttfts" in result:
        spans = ClientSpans(begin, length, process, model)
        for request, gaps in zip(_requests(result), result["itls"], strict=True):
            spans.add(request, gaps)
        yield from spans.take(math.inf)
        begin = max(begin, end - length)  # what is known of the whole alone is put to its end
    else:
        batch.values[names.E2E] = [seconds for seconds in result.get("latencies", ()) if seconds > 0]
        counts |= {
            "prompt_tokens": result["total_input_tokens"],
            names.GENERATED: result.get("total_output_tokens", 0),
            f"{names.FINISHED}completed": result["completed"],
            f"{names.FINISHED}{ERROR}": result.get("failed", 0),
        }
    batch.counters.update({name: int(count) for name, count in counts.items() if count})
    whole = Snapshot(begin, end, processes={process}, models={model})
    whole.add(batch)
    yield whole


def _requests(result: dict[str, Any]) -> Iterator[Request]:
    begin, _ = span_of(result)
    first = min(result["start_times"], default=0.0)
    columns = ("start_times", "latencies", "ttfts", "input_lens", "output_lens", "errors")
    for start, latency, ttft, prompt, generated, error in zip(*(result[name] for name in columns), strict=True):
        reason = ERROR if error else "completed"
        yield Request.of_client(begin + start - first, latency, ttft or None, (prompt, generated), reason)
