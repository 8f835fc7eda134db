"""The tool that sets all versions: what it takes for one, and that it writes it everywhere."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.support.environments import PACKAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

PROJECTS = ("pyproject.toml", *(f"packages/{name}/pyproject.toml" for name in PACKAGES))


def bump(place: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Run the tool on a copy of what it changes."""
    for file in (*PROJECTS, ".ci/bump.py"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, place / file)
    command = ["uv", "run", "--no-project", "--with", "tomlkit", "python", str(place / ".ci/bump.py"), version]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("version", ["0.32.0.post1", "0.33.0rc1", "0.32.1"])
def test_it_writes_the_version_and_all_pins(version: str, tmp_path: Path) -> None:
    done = bump(tmp_path, version)
    assert done.returncode == 0, done.stderr
    for file in PROJECTS:
        project = tomllib.loads((tmp_path / file).read_text())["project"]
        assert project["version"] == version
        for extra in project.get("optional-dependencies", {}).values():
            assert all(pin.endswith(f"=={version}") for pin in extra if pin.startswith("npu-"))


@pytest.mark.parametrize("version", ["0.32", "v0.32.1", "0.32.0post1", "0.32.0.post"])
def test_it_refuses_what_is_no_version_of_ours(version: str, tmp_path: Path) -> None:
    done = bump(tmp_path, version)
    assert done.returncode == 1
    assert "A version looks like" in done.stderr
    assert all((tmp_path / file).read_text() == (ROOT / file).read_text() for file in PROJECTS)
