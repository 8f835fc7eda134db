"""The command npu: what all its sub-commands share; and what a command of vLLM prints where npu is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from vllm.snapshot.manifest import SnapshotManifest, write_manifest_atomic

from npu_platform import cli

if TYPE_CHECKING:
    from pathlib import Path

# Unbuffered, argparse swallows what goes wrong when it prints.
SETTINGS = ("NPU_", "VLLM_", "PYTHONUNBUFFERED")
# What vLLM's manifest of a snapshot has beside words.
NOT_WORDS: dict[str, Any] = {
    "environment": (("NAME", "value"),),
    "schema_version": 1,
    "boundary": "post-engine-init-reloadable-state-released",
    "artifact_bytes": 0,
    "engine_argv": ("MODEL",),
    "process_tree": (1,),
    "cuda_holders": (1,),
    "external_cache_files": (),
    "oracle_token_ids": (1,),
    "oracle_sampled_token_logprob": -1.0,
}
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}


@pytest.mark.parametrize(
    "arguments", [["info"], pytest.param(["doctor", "--json"], marks=pytest.mark.nightly), ["--help"]]
)
def test_a_reader_that_has_gone_ends_it_in_silence(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "npu_platform.cli", *arguments]
    done = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, text=True, env=CLEAN, timeout=300, check=False
    )
    os.close(write_end)
    assert done.returncode == 141
    assert "BrokenPipe" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("NPU_VISIBLE_DEVICES", "", "NPU_VISIBLE_DEVICES must name a device, not '', which hides all; unset it"),
        ("NPU_ISA", "foo", "NPU_ISA must be one of"),
    ],
)
def test_a_wrong_variable_is_a_sentence(name: str, value: str, sentence: str) -> None:
    command = [sys.executable, "-m", "npu_platform.cli", "info"]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN | {name: value}, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(sentence)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "usage", "sentence"),
    [
        ("warm MODEL", "npu warm [--json]", "MODEL (arguments of vllm serve stand behind --: npu warm -- MODEL)"),
        (
            "doctor --plan MODEL -tp 2",
            "npu doctor",
            "2 (arguments of vllm serve stand behind --: npu doctor --plan -- MODEL)",
        ),
        ("doctor --plan", "npu doctor", "it needs a model: npu doctor --plan -- MODEL"),
        ("info more", "npu info", "unrecognized arguments: more\n"),
    ],
)
def test_what_a_command_does_not_know_is_told_with_its_own_usage(
    arguments: str, usage: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments.split())
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage}")
    assert sentence in said


@pytest.mark.nightly
def test_a_command_of_vllm_prints_json_alone(tmp_path: Path) -> None:
    """Its options load all plugins, which may log what they register, and vLLM logs to stdout."""
    manifest = SnapshotManifest(**dict.fromkeys(SnapshotManifest.model_fields, "a word") | NOT_WORDS)
    tmp_path.chmod(0o700)
    write_manifest_atomic(tmp_path, manifest)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "snapshot", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, timeout=300, check=True)
    assert json.loads(done.stdout)["oracle_text"] == "a word"
