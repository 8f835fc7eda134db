"""The report: whole, safe, from bounded memory, and the odd things of a run in it."""

from __future__ import annotations

import json
import re
import tracemalloc
from datetime import datetime
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from npu_statlogger.cli import main
from npu_statlogger.fold import Batch
from npu_statlogger.sketch import Sketch
from npu_statlogger.tools import names
from npu_statlogger.tools.overview import Overview

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[..., Path]


class Page(HTMLParser):
    """Notes what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href", "srcset"}]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def html(path: Path, *files: Path) -> tuple[Page, str]:
    assert main(["report", *map(str, files), "--html", str(path)]) == 0
    text = path.read_text()
    return Page(text), text


def svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>") for part in text.split("<svg")[1:]]


def test_a_page_needs_nothing_else_and_its_plots_are_whole(write_run: Write, tmp_path: Path) -> None:
    page, text = html(tmp_path / "out.html", write_run(engines=2))
    assert not page.links
    assert "script" not in page.tags
    assert "url(" not in text
    assert "@import" not in text
    plots = svgs(text)
    titles = [plot.get("aria-label") for plot in plots]
    assert {"tokens generated per second", "time to first token", "between tokens", "KV cache in use"} <= set(titles)
    assert "running, by engine" in titles
    assert "drafted tokens accepted" not in titles  # nothing was drafted
    for plot in plots:
        assert plot.findall("path") or plot.findall("circle")
        assert "nan" not in ET.tostring(plot, "unicode").lower().replace("resonance", "")


def test_names_from_a_file_are_text(write_run: Write, tmp_path: Path) -> None:
    page, text = html(tmp_path / "out.html", write_run(model="<script>alert(1)</script>", process="<b>:1"))
    assert "script" not in page.tags
    assert "&lt;script&gt;" in text


def test_one_line_is_enough(write_run: Write, tmp_path: Path) -> None:
    page, text = html(tmp_path / "out.html", write_run(lines=1))
    assert all(plot.findall("circle") or plot.findall("path") for plot in svgs(text))
    assert page.tags.count("svg") >= 5


def odd(batch: Batch, line: int, engine: int) -> None:
    if line == 20:
        batch.values[names.ITL].append(30.0)
    if 22 <= line < 25 and engine == 0:
        batch.values[names.TTFT], batch.values[names.ITL] = [], []
        batch.counters["generation_tokens"] = batch.counters["prompt_tokens"] = 0
    if 26 <= line < 29:
        batch.counters["num_preemptions"] = 30
    if line >= 32:
        batch.counters["prefix_cache_hits"] = 5 * batch.counters["prefix_cache_queries"] // 100


def test_stalls_storms_and_a_falling_hit_rate_are_found_when_they_were(
    write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(engines=2, lines=40, interval=16.0, start=1_795_376_384.0, change=odd)
    assert main(["report", str(path), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    at = [(each["kind"], round((each["start"] - 1_795_376_384.0) / 16), each["engine"]) for each in findings]
    assert at == [("stall", 20, None), ("stall", 22, 0), ("preemptions", 26, None), ("hit_rate", 32, None)]
    assert "30 s after the one before" in findings[0]["text"]
    assert "gave no token" in findings[1]["text"]
    assert "from 60 % to 5 %" in findings[3]["text"]
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Out of the ordinary:" in text
    assert "a storm of preemptions: 180" in text


def test_what_took_a_minute_is_found_in_a_run_of_a_day(make_load: type) -> None:
    def storm(batch: Batch, line: int, engine: int) -> None:
        if line in range(700, 704) or line in range(1238, 1242):
            batch.counters["num_preemptions"] = 30

    overview = Overview()
    for _ in range(2):  # as two files, of two API servers, are read
        for snapshot in make_load(lines=1500, interval=64.0, requests=4, start=64.0 * 10**7, change=storm).snapshots():
            overview.add(snapshot)
    assert overview.timeline.width > 400  # too coarse to see them
    found = [(finding.kind, finding.start / 64 - 10**7, finding.end / 64 - 10**7) for finding in overview.findings()]
    assert found == [("preemptions", 700, 704), ("preemptions", 1238, 1242)]
    assert overview.findings() == overview.findings()


def test_an_ordinary_run_has_nothing_odd(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(write_run(engines=3, lines=60)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_lost_records_and_refused_requests_are_said(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    def lose(batch: Batch, line: int, engine: int) -> None:
        batch.counters.update({"records_dropped": 1, "admission_rejections.full": 2})

    assert main(["report", str(write_run(lines=10, change=lose))]) == 0
    text = capsys.readouterr().out
    assert "10 records of steps were dropped" in text
    assert "20 requests were refused" in text


def test_the_load_of_all_engines_is_their_sum(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    def constant(batch: Batch, line: int, engine: int) -> None:
        batch.values["num_requests_running"] = [float(3 + engine)] * 10

    assert main(["report", str(write_run(engines=3, change=constant)), "--json"]) == 0
    series = json.loads(capsys.readouterr().out)["series"]
    assert set(series["requests"]["running"]) == {12.0}
    assert set(series["running, by engine"]["engine 2"]) == {5.0}


def test_days_of_lines_need_bounded_memory(make_load: type) -> None:
    overview = Overview()
    tracemalloc.start()
    for snapshot in make_load(lines=700, requests=3).snapshots():
        overview.add(snapshot)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 120 <= len(list(overview.timeline)) <= 240
    size = Sketch()._counts.nbytes + 1000
    # Twice 240 spans of 5 latencies, for the plots and for what is odd; the lines themselves would need more.
    assert peak < 2 * 240 * 5 * size * 1.1 + 2e6


def test_the_slowest_requests_are_told_apart(
    write_run: Write, request_line: Callable, as_text: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(lines=3)
    with path.open("a") as file:
        file.write(as_text(request_line(e2e=1.0 + index % 37, preemptions=index) for index in range(200)))
    assert main(["report", str(path)]) == 0
    table = capsys.readouterr().out.partition("The slowest requests:\n")[2].splitlines()[1:11]
    assert [row.split()[-3:-1] for row in table] == [["37", "s"]] * 5 + [["36", "s"]] * 5
    assert [row.split()[-1] for row in table[:2]] == ["184", "147"]


def test_a_client_stands_beside_what_the_server_did_in_the_same_time(
    write_run: Write, tmp_path: Path, bench_result: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow_before(batch: Batch, line: int, engine: int) -> None:
        if line < 30:
            batch.values[names.TTFT] = [9.0] * 20

    result = tmp_path / "result.json"
    end = datetime.fromtimestamp(1_795_376_400.0 + 400).astimezone()
    result.write_text(json.dumps(bench_result() | {"date": end.strftime("%Y%m%d-%H%M%S"), "duration": 100.0}))
    assert main(["report", str(write_run(change=slow_before)), str(result)]) == 0
    rows = dict(re.findall(r"^(time to first token, \S+) +100 ms +(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert set(rows) == {"time to first token, mean", "time to first token, median", "time to first token, p99"}
    assert all(row.endswith("ms") for row in rows.values())
    assert main(["report", str(result)]) == 0
    text = capsys.readouterr().out
    assert "requests finished" in text
    assert re.search(r"time to first token, median +100 ms +-$", text, re.MULTILINE)


def test_an_unwritable_output_is_named(write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(write_run(lines=1)), "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert main(["report", str(write_run(lines=1)), "--html", "/dev/full"]) == 2
    assert "No space left on device" in capsys.readouterr().err
