"""npu-kv check: exit codes, JSON, and the reasons it gives."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from npu_kvconnector.cli import check, main

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM knows its own tiers")


def test_json_says_what_a_configuration_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "--json", "--config", '{"cpu_bytes_to_use": "8GiB"}'])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if HAS_VLLM else 1)
    assert report["options"]["cpu_bytes_to_use"] == 2**33
    assert report["kv_transfer_config"]["kv_connector_extra_config"] == {"cpu_bytes_to_use": "8GiB"}
    assert bool(report["problems"]) != HAS_VLLM


@pytest.mark.parametrize(
    ("config", "blocks"), [("{}", "1"), ('{"blocks_per_chunk": 4}', "4"), ('{"block_size": 64}', None)]
)
def test_options_that_are_not_given_are_shown_as_they_are_taken(
    config: str, blocks: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "--config", config])
    said = capsys.readouterr().out
    assert re.findall("blocks_per_chunk = (.*)", said) == ([blocks] if blocks else [])
    assert ("block_size = 64" in said) == (blocks is None)
    assert "None" not in said


@pytest.mark.parametrize("config", ['{"cpu_bytes": 1}', "[1]", "{", '{"blocks_per_chunk": 0}'])
def test_a_wrong_configuration_is_a_problem(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", config]) == 1
    assert "problem: --config: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({"type": "durable", "path": "/x", "byte": 1}, "durable: unknown key 'byte' .* did you mean 'bytes'"),
        ({"type": "durable", "path": "x", "bytes": 1}, "durable: path must be the absolute name of a folder"),
        ({"type": "durable", "path": "/x", "bytes": 1, "transport": "tcp"}, "durable: unknown key 'transport'"),
        ({"type": "durable", "path": "/x", "bytes": 1, "namespace": 5}, "durable: namespace must be a text"),
        ({"type": "remote", "url": 5}, "remote: url must be a text"),
        ({"type": "remote", "ur": "s3://bucket/kv"}, "remote: unknown key 'ur' .* did you mean 'url'"),
        pytest.param({"type": "durabel"}, "durabel: .*'durable'", marks=needs_vllm),
        pytest.param({"type": "Mine", "module_path": "no.such"}, "Mine: No module named 'no'", marks=needs_vllm),
        pytest.param(
            {"type": "JSONDecoder", "module_path": "json"},
            "JSONDecoder: .* is no SecondaryTierManager",
            marks=needs_vllm,
        ),
        pytest.param(
            {"type": "SecondaryTierManager", "module_path": "vllm.v1.kv_offload.tiering.base"},
            "SecondaryTierManager: .* lacks .*, lookup, .*, submit_store: ",
            marks=needs_vllm,
        ),
        pytest.param(
            {"type": "p2p", "transport": "tpc"}, 'p2p: transport .* must be "nixl" or "tcp"', marks=needs_vllm
        ),
    ],
)
def test_what_is_wrong_with_a_tier_is_a_problem_with_its_place(
    tier: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    durable = {"type": "durable", "path": "/var/cache/npu-kv", "bytes": "100GiB"}
    assert main(["check", "--config", json.dumps({"secondary_tiers": [durable, tier]})]) == 1
    assert re.search(f"problem: --config: tier 2, {said}", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backpressure": {"backpressure_cls": "NoSuchDetector"}}, "has no class 'NoSuchDetector'"),
        ({"backpressure": {"backpressure_cls": "no.such.Detector"}}, "'Detector' cannot be had"),
        ({"eviction_policy": "Mine", "cache_policy_module_path": "no.such"}, "'Mine' cannot be had"),
        ({"eviction_policy": "Mine", "cache_policy_module_path": "json"}, "json has no class 'Mine'"),
    ],
)
@needs_vllm
def test_a_class_that_is_not_there_is_a_problem(options: dict[str, Any], said: str) -> None:
    assert said in "".join(check(json.dumps(options))["problems"])


def test_two_tiers_of_the_documentation_are_no_problem() -> None:
    tiers = [
        {"type": "durable", "path": "/var/cache/npu-kv", "bytes": 107374182400},
        {"type": "remote", "url": "s3://bucket/kv"},
    ]
    report = check(json.dumps({"cpu_bytes_to_use": 2147483648, "secondary_tiers": tiers}))
    assert not [problem for problem in report["problems"] if "tier" in problem]


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


def test_a_wrong_command_line_is_json_where_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ls", "x", "--json", "--limit", "some"])
    assert caught.value.code == 2
    assert "--limit" in json.loads(capsys.readouterr().out)["error"]
