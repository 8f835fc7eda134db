"""The command ``npu warm``: what it says where there is nothing to compile, or no way to; tests/e2e/test_warm.py serves."""

from __future__ import annotations

import json

import pytest

from npu_platform import cli


def test_it_needs_a_model(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["warm", "--json"])
    assert ended.value.code == 2
    assert "npu warm -- MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, "VLLM_USE_V2_MODEL_RUNNER=0 serves without Triton kernels"),
        ({"TRITON_DEFAULT_BACKEND": "nvidia"}, "TRITON_DEFAULT_BACKEND=nvidia serves without Triton kernels"),
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler (apt install g++, or name one in CXX)"),
    ],
)
def test_a_problem_is_told_with_the_way_out(environ, sentence, monkeypatch, capsys, tmp_path):
    for name in ("TRITON_DEFAULT_BACKEND", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["warm", "--", "model"]) == 1
    assert sentence in capsys.readouterr().err
    assert cli.main(["warm", "--json", "--", "model"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert sentence in report["problem"]
    assert report["compiled"] == []
