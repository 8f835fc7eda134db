from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys

import pytest
import torch

import npu_ops
from npu_ops import choices, native, other_work
from npu_ops.config import OpsConfig
from npu_ops.errors import ConfigError
from npu_ops.layers.linear import warm_up

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty directory, nobody else's work that is seen, and no choice left behind."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(other_work, "_STAT", tmp_path / "no file")
    yield tmp_path
    for n in (48, 64):
        torch.ops.npu_ops._choose_linear(torch.empty(0), n, 32, 0, 0)


def weights(n=48, dtype=torch.float32):
    return [torch.randn(n, 32).to(dtype) for _ in range(2)]


def choice(m, n=48, k=32):
    return torch.ops.npu_ops._linear_choice(torch.empty(0), n, k, m)


def given(shapes):
    """Write a file as a former start would have."""
    key = choices.machine(CPU)
    file = choices.path(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": key, "shapes": shapes}))
    return file


def test_what_is_measured_is_written_and_told():
    choices.measure(weights(), 20)
    shapes = choices.shapes(choices.machine(CPU))
    assert set(shapes) == {"float32 48x32"}
    assert list(shapes["float32 48x32"]) == ["1", "2", "4", "8", "16", "32"]
    for rows, entry in shapes["float32 48x32"].items():
        assert entry["linear"] == ("torch" if entry["torch_us"] < choices.GAIN * entry["npu_us"] else "npu")
        assert choice(int(rows)) == (entry["linear"] == "torch")
    assert choices.summary()[1] in (0, 6)  # 0: the default device is not this one
    assert choice(3) == choice(4)
    assert choice(1000) == choice(32)
    assert choice(4, n=49) == -1


def test_nothing_is_chosen_beside_other_work(monkeypatch, caplog):
    """What takes half of the processors for a moment would slow one of the two, and be believed for good."""
    caplog.set_level("INFO", logger="vllm.npu_ops")
    given({"float32 64x32": {"1": {"linear": "torch"}}})
    disturbs = iter([False, True, True])
    monkeypatch.setattr(
        choices.OtherWork, "disturbs", lambda _, threads: threads == torch.get_num_threads() and next(disturbs)
    )
    choices.measure([*weights(), *weights(64)], 2)
    assert "has not measured linear layers of float32 48x32, float32 64x32: others took" in caplog.text
    assert [choice(1), choice(2), choice(1, 64), choice(2, 64)] == [-1, -1, 1, 1]
    assert set(choices.shapes(choices.machine(CPU))) == {"float32 64x32"}


def test_layers_that_a_model_is_without_are_not_measured():
    """vLLM leaves them on meta: the head of a language model that sorts texts."""
    there, missing, alike = (
        torch.nn.Linear(32, n, device=device) for n, device in ((48, "cpu"), (64, "meta"), (48, "meta"))
    )
    warm_up([missing, there, alike], 4)
    assert set(choices.shapes(choices.machine(CPU))) == {"float32 48x32"}
    warm_up([missing], 4)


def test_what_is_known_is_not_measured_again():
    file = given({"float32 48x32": {str(2**i): {"linear": "torch" if i == 2 else "npu"} for i in range(10)}})
    before = file.read_text()
    choices.measure(weights(), 8192)
    assert file.read_text() == before
    assert [choice(m) for m in (1, 2, 3, 4, 5, 512, 4096)] == [0, 0, 1, 1, 0, 0, 0]


def test_only_what_is_missing_is_measured():
    given({"float32 48x32": {"1": {"linear": "torch"}}})
    choices.measure([*weights(), *weights(64)], 4)
    shapes = choices.shapes(choices.machine(CPU))
    assert shapes["float32 48x32"]["1"] == {"linear": "torch"}
    assert set(shapes["float32 48x32"]) == set(shapes["float32 64x32"]) == {"1", "2", "4"}


def test_the_choice_is_obeyed(device):
    """The two add up in different orders, so that their bits tell them apart."""
    x, w = torch.randn(40, 1000, device=device), torch.randn(300, 1000, device=device)
    linear, choose = torch.ops.npu_ops.linear, torch.ops.npu_ops._choose_linear
    choose(w, 300, 1000, 0xFFFF, 0)
    ours = linear(x, w, None)
    choose(w, 300, 1000, 0xFFFF, 0xFFFF)
    torchs = linear(x, w, None)
    assert torch.equal(torchs, torch.nn.functional.linear(x, w))
    assert not torch.equal(ours, torchs)
    npu_ops.native.set_batch_invariant(on=True)
    invariant = linear(x, w, None)
    npu_ops.native.set_batch_invariant(on=False)
    choose(w, 300, 1000, 0, 0)
    assert not torch.equal(invariant, torchs)


def test_a_recorded_graph_chooses_as_a_plain_call(device):
    if device == "cpu":
        pytest.skip("graphs are the device's")
    x, w = torch.randn(5, 1000, device=device).bfloat16(), torch.randn(300, 1000, device=device).bfloat16()
    for torchs in (0, 0xFFFF):
        torch.ops.npu_ops._choose_linear(w, 300, 1000, 0xFFFF, torchs)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = torch.ops.npu_ops.linear(x, w, None)
        x.normal_()
        graph.replay()
        assert torch.equal(y, torch.ops.npu_ops.linear(x, w, None))
    torch.ops.npu_ops._choose_linear(w, 300, 1000, 0, 0)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"machine": {}, "shapes": {}}', '{"shapes": 3}', "\0\1"])
def test_a_file_that_cannot_be_used_is_measured_anew(content, caplog):
    file = given({})
    file.write_text(content)
    choices.measure(weights(), 1)
    assert "measures linear layers anew" in caplog.text
    assert set(choices.shapes(choices.machine(CPU))) == {"float32 48x32"}


def test_entries_of_another_form_are_not_taken(caplog):
    given({"float32 48x32": {"1": {"linear": "fastest"}}})
    assert choices.shapes(choices.machine(CPU)) == {}
    given({"float32 48x32": {"3": {"linear": "npu"}}})
    assert choices.shapes(choices.machine(CPU)) == {}
    assert "another machine or form" in caplog.text


def test_another_machine_has_another_file():
    key = choices.machine(CPU)
    assert len({choices.path(key | {name: "other"}) for name in key}) == len(key)


def test_another_build_measures_anew(tmp_path, monkeypatch):
    assert choices.machine(CPU)["npu_ops"].endswith(native.digest())
    library = tmp_path / "_C.so"
    monkeypatch.setattr(native, "_LIBRARY", library)
    digests = set()
    for content in (b"one build", b"another"):
        library.write_bytes(content)
        native.digest.cache_clear()
        digests.add(native.digest())
    native.digest.cache_clear()
    assert len(digests) == 2


def test_a_directory_that_cannot_be_written_is_no_error(cache, monkeypatch, caplog):
    (cache / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache / "file"))
    choices.measure(weights(), 1)
    assert choice(1) in (0, 1)
    assert "could not keep" in caplog.text


@pytest.mark.parametrize("invariant", [False, True])
def test_switched_off(cache, monkeypatch, invariant):
    if not invariant:
        monkeypatch.setenv("NPU_TUNE", "0")
    npu_ops.native.set_batch_invariant(on=invariant)
    choices.measure(weights(), 1)
    npu_ops.native.set_batch_invariant(on=False)
    assert choice(1) == -1
    assert list(cache.iterdir()) == []


def test_writers_at_the_same_time_lose_nothing():
    key = choices.machine(CPU)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(key, i)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(choices.shapes(key)) == 4 * 20
    assert [file.suffix for file in choices.path(key).parent.iterdir()].count(".json") == 1


def _write_many(key, process):
    for i in range(20):
        choices._write(key, {f"float32 {process}x{i}": {"1": {"linear": "npu"}}})


def test_more_shapes_than_the_table_holds_are_refused():
    """In a process of its own: what the table holds it holds for ever."""
    code = """
import torch, npu_ops
choose = torch.ops.npu_ops._choose_linear
like = torch.empty(0)
taken = [choose(like, n, 7, 1, 1) for n in range(1, 6000)]
assert all(taken[:2000]) and not all(taken)
chosen = [torch.ops.npu_ops._linear_choice(like, n, 7, 1) for n in range(1, 6000)]
assert chosen == [1 if took else -1 for took in taken]
assert not choose(like, 1 << 28, 7, 1, 1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_variables(monkeypatch):
    monkeypatch.setenv("NPU_TUNE", "yes")
    with pytest.raises(ConfigError, match="NPU_TUNE must be 0 or 1, got 'yes'"):
        OpsConfig.from_environment()
    monkeypatch.delenv("NPU_TUNE")
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(OpsConfig.from_environment().cache) == "/caches/vllm"
    assert OpsConfig.from_environment().tune
    monkeypatch.setenv("NPU_HEAD_BITS", "4")
    with pytest.raises(ConfigError, match="NPU_HEAD_BITS must be 8 or 16, got '4'"):
        OpsConfig.from_environment()
    monkeypatch.setenv("NPU_HEAD_BITS", "8")
    assert OpsConfig.from_environment().head_bits == 8
