"""The dashboard and the alert rules: of the right form, and about metrics that vLLM really exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog import encoder
from grafana_foundation_sdk.models import dashboard as grafana

from npu_statlogger.cli import main
from npu_statlogger.fold import Batch
from npu_statlogger.metrics import Kind, metrics
from npu_statlogger.sinks.families import PREFIX, Families
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools.dashboard import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLES = {"$__rate_interval": "5m", "$model": "m", "$engine": "0"}


def dashboard() -> dict[str, Any]:
    return json.loads(text_of("grafana"))


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(text_of("alerts"))["groups"]
    return group["rules"]


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield text
    yield from (rule["expr"] for rule in rules())


def selectors(expression: object) -> Iterator[Any]:
    """Yield each selection of series in a parsed expression."""
    kind = type(expression).__name__
    if kind == "VectorSelector":
        yield expression
    elif kind == "MatrixSelector":
        yield expression.vector_selector
    else:
        for name in ("lhs", "rhs", "expr", "param"):
            part = getattr(expression, name, None)
            if part is not None and not isinstance(part, str):
                yield from selectors(part)
        for part in getattr(expression, "args", ()):
            yield from selectors(part)


def test_each_metric_of_vllm_is_one_that_it_exports() -> None:
    """The table of metrics agrees with vLLM's own (test_metrics.py); tests/e2e asks a server."""
    exported = {(metric.kind, metric.name) for metric in metrics() if not metric.own}
    names = {selector.name for text in expressions() for selector in selectors(promql.parse(text))}
    theirs = {name.removeprefix("vllm:") for name in names if not name.startswith(PREFIX)}
    assert len(theirs) > 25
    for name in theirs:
        plain, _, suffix = name.rpartition("_")
        kind = {"total": Kind.COUNTER, "bucket": Kind.DISTRIBUTION, "count": Kind.DISTRIBUTION}.get(suffix)
        assert ((kind, plain) if kind else (Kind.GAUGE, name)) in exported, name


def test_each_metric_of_the_logger_is_one_that_its_collector_exports() -> None:
    batch = Batch()
    batch.counters.update({"records_dropped": 1, "records_failed": 1, "sink_lines_dropped.otlp": 1})
    batch.values.update({"time_to_first_token_seconds": [0.1], "inter_token_latency_seconds": [0.1]})
    snapshot, families = Snapshot(1, 2, {"host:1"}, {"m"}, {0}), Families("m")
    snapshot.add(batch, 0)
    families.add([snapshot])
    samples = {sample.name: set(sample.labels) for family in families.collect() for sample in family.samples}
    asked = [each for text in expressions() for each in selectors(promql.parse(text)) if each.name.startswith(PREFIX)]
    assert {each.name for each in asked} <= samples.keys()
    for each in asked:
        assert {matcher.name for matcher in each.matchers.matchers} <= samples[each.name], each.name


def test_the_dashboard_is_one_of_grafanas() -> None:
    known = dashboard()
    read = grafana.Dashboard.from_json(known)
    written = json.loads(json.dumps(read.to_json(), cls=encoder.JSONEncoder))
    assert written["title"] == known["title"]
    assert [panel["title"] for panel in written["panels"]] == [panel["title"] for panel in known["panels"]]
    for panel in known["panels"]:
        again = next(each for each in written["panels"] if each["id"] == panel["id"])
        assert set(panel) - {"panels"} <= set(again), panel["title"]
        assert again["type"] == panel["type"]
        assert again["gridPos"] == panel["gridPos"]


def test_panels_lie_beside_each_other_and_have_targets() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]
        assert all(
            target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            for target in panel.get("targets", ())
        )


def test_each_rule_says_what_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "what"}
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = set(re.findall(r"by \(([^)]*)\)", rule["expr"])[0].split(", ")) if used else set()
        assert used <= kept, rule["alert"]


def test_promtool_takes_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt: prometheus)")
    (tmp_path / "alerts.yml").write_text(text_of("alerts"))
    cases = Path(__file__).with_name("alerts_cases.yml")
    shutil.copy(cases, tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", cases.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    fired = {
        case["alertname"] for test in yaml.safe_load(cases.read_text())["tests"] for case in test["alert_rule_test"]
    }
    assert fired == {rule["alert"] for rule in rules()}


@pytest.mark.parametrize("what", ["grafana", "alerts"])
def test_the_command_gives_the_text(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", what]) == 0
    assert capsys.readouterr().out == text_of(what)
    assert main(["dashboard", what, "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_text() == text_of(what)
