"""npu-kv check: exit codes, JSON, and the reasons it gives."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from npu_kvconnector.cli import main

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def test_json_says_what_a_configuration_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "--json", "--config", '{"cpu_bytes_to_use": "8GiB"}'])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if HAS_VLLM else 1)
    assert report["options"]["cpu_bytes_to_use"] == 2**33
    assert report["kv_transfer_config"]["kv_connector_extra_config"] == {"cpu_bytes_to_use": "8GiB"}
    assert bool(report["problems"]) != HAS_VLLM


@pytest.mark.parametrize("config", ['{"cpu_bytes": 1}', "[1]", "{", '{"blocks_per_chunk": 0}'])
def test_a_wrong_configuration_is_a_problem(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", config]) == 1
    assert "problem: --config: " in capsys.readouterr().out


def test_a_partial_allow_list_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "npu,npu_ops")
    assert main(["check"]) == 1
    assert "set VLLM_PLUGINS=npu,npu_ops,npu_kvconnector" in capsys.readouterr().out


def test_a_reader_that_has_gone_ends_it_in_silence() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    # without vLLM, whose import takes seconds
    program = "import sys; sys.modules['vllm'] = None; from npu_kvconnector.cli import main; sys.exit(main(['check']))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(write_end)
    assert done.returncode == 141
    assert "BrokenPipe" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_command_line_exits_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["chek"])
    assert caught.value.code == 2
