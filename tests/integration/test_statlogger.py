"""npu-statlogger in a real engine on npu: every request and every token is counted once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support import statistics_page
from tests.support.environments import ROOT
from tests.support.models import tiny_llama
from tests.support.vllm_process import run_module, run_program

REQUESTS, TOKENS = 6, 9

OFFLINE = f"""
import pathlib, shutil, sys
from vllm import LLM, SamplingParams
from npu_statlogger import attach

folder = pathlib.Path(sys.argv[2])
# In float32, since how many requests share a step differs, and bfloat16's noise could decide.
llm = LLM(
    sys.argv[1], dtype="float32", skip_tokenizer_init=True, max_model_len=256, enforce_eager=True, disable_log_stats=False
)
sampling = SamplingParams(max_tokens={TOKENS}, ignore_eos=True, detokenize=False, temperature=0)
prompts = [{{"prompt_token_ids": [3, 4, 5 + number]}} for number in range({REQUESTS})]

def tokens():
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, sampling)]

without = tokens()
logger = attach(llm, path=str(folder / "stats.jsonl"), requests=1.0)
assert tokens() == without
logger.close()
(folder / "gone").mkdir()
places = {{name: str(folder / "gone" / name) for name in ("path", "csv", "parquet")}}
failing = attach(llm, interval=0.1, requests=1.0, otlp="http://127.0.0.1:9", push="http://127.0.0.1:9", **places)
shutil.rmtree(folder / "gone")
assert tokens() == without
failing.close()
"""


def test_every_request_and_token_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    arguments = (tiny_llama(tmp_path / "model"), str(REQUESTS), str(TOKENS))
    environ = {"NPU_STATLOGGER_PATH": str(path), "NPU_STATLOGGER_INTERVAL": "0.2"}
    done = run_module("tests.support.async_engine_run", *arguments, **environ)
    assert done.returncode == 0, done.stderr[-6000:]
    summary = subprocess.run(
        [str(Path(sys.prefix) / "bin" / "npu-stat"), "summary", str(path), "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    merged = json.loads(summary.stdout)
    assert summary.stderr == ""
    counters, distributions = merged["counters"], merged["distributions"]
    assert counters["request_success.length"] == REQUESTS
    assert counters["generation_tokens"] == REQUESTS * TOKENS
    assert counters["prompt_tokens"] == sum(range(1, REQUESTS + 1))
    assert "records_failed" not in counters
    assert "records_dropped" not in counters
    assert distributions["time_to_first_token_seconds"]["count"] == REQUESTS
    assert distributions["inter_token_latency_seconds"]["count"] == REQUESTS * (TOKENS - 1)
    assert distributions["e2e_request_latency_seconds"]["count"] == REQUESTS
    assert distributions["e2e_request_latency_seconds"]["max"] >= distributions["time_to_first_token_seconds"]["max"]
    assert (
        distributions["request_generation_tokens"]["min"] == distributions["request_generation_tokens"]["max"] == TOKENS
    )
    assert 0 < distributions["kv_cache_usage_perc"]["max"] < 1
    assert distributions["num_requests_running"]["max"] <= REQUESTS
    assert merged["rates"]["generation_tokens_per_second"] > 0


def test_the_page_of_fields_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/statistics.md").read_text() == statistics_page.text(), (
        "python -m tests.support.statistics_page > docs/reference/statistics.md"
    )


def test_an_offline_engine_is_recorded_after_one_call_and_failing_sinks_change_no_token(tmp_path: Path) -> None:
    done = run_program(OFFLINE, str(tiny_llama(tmp_path / "model")), str(tmp_path))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    assert lines[0]["settings"]["max_model_len"] == 256
    requests = [line for line in lines if line["kind"] == "request"]
    assert [line["generation_tokens"] for line in requests] == [TOKENS] * REQUESTS
    assert (
        sum(line["counters"]["generation_tokens"] for line in lines if line["kind"] == "interval") == TOKENS * REQUESTS
    )
    assert output.count("could not be written to file") == output.count("could not be sent to otlp") == 1
    assert "did not take the last lines" in output
