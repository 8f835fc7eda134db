"""What control groups leave: nested slices of version 2, version 1, both at once, and a container's view."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from npu_kvconnector.tiers.memory import _free, available_bytes, groups_of

GIB = 2**30


def make_group(folder: Path, limit: str, used: int, reclaimable: int, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]}inactive_file {reclaimable}\n")


def groups(mount: Path, membership: str) -> list[Path]:
    (mount / "membership").write_text(membership)
    return [folder.relative_to(mount) for folder in groups_of(mount / "membership", mount)]


def test_a_slice_around_the_process_s_own_group_limits_it(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    make_group(tmp_path / "user.slice", str(6 * GIB), 5 * GIB, GIB)
    make_group(tmp_path / "user.slice" / "engine.service", "max", 4 * GIB, 0)
    found = groups(tmp_path, "0::/user.slice/engine.service\n")
    assert found == [Path("user.slice/engine.service"), Path("user.slice"), Path()]
    assert [_free(tmp_path / group) for group in found] == [None, 2 * GIB, None]


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    make_group(tmp_path / "memory", str(2**63 - 4096), GIB, 0, version=1)
    make_group(tmp_path / "memory" / "job", str(3 * GIB), 2 * GIB, GIB // 2, version=1)
    found = groups(tmp_path, "9:name=systemd:/\n8:cpu,memory:/job\n0::/\n")
    assert found == [Path("memory/job"), Path("memory"), Path("unified")]
    assert _free(tmp_path / "memory" / "job") == 3 * GIB // 2
    assert _free(tmp_path / "unified") is None


@pytest.mark.parametrize("path", ["/docker/4fd2", "/../../4fd2"])
def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path, path: str) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    make_group(tmp_path, str(2 * GIB), GIB, 0)
    assert [_free(tmp_path / group) for group in groups(tmp_path, f"0::{path}\n")] == [GIB]


def test_no_control_groups(tmp_path: Path) -> None:
    assert list(groups_of(tmp_path / "missing", tmp_path)) == []


def test_this_machine_has_some() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total
