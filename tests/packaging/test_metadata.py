"""What wheels and sdists say about themselves, and that they hold what they must: licence, types, sources."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email.parser import Parser
from typing import TYPE_CHECKING

import pytest

from tests.support.environments import PACKAGES, ROOT, uv

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

LICENSE = (ROOT / "LICENSE").read_bytes()
NATIVE = ("npu-platform", "npu-ops")
PYTHONS = {"npu-platform": ">=3.11,<3.14", "npu-ops": ">=3.11,<3.14"}
"""Ranges of Python; a package that is Python alone excludes no later one."""


def module(name: str) -> str:
    return name.replace("-", "_")


def read_wheel(wheels: Path, name: str) -> dict[str, bytes]:
    """Return the files of a distribution's wheel, those of its metadata without their folder."""
    (wheel,) = wheels.glob(f"{module(name)}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {re.sub(r"^[^/]+\.dist-info/", "", file): archive.read(file) for file in archive.namelist()}


def read_sdist(sdists: Path, name: str) -> dict[str, bytes]:
    """Return the files of a distribution's sdist, without the folder that they are in."""
    (sdist,) = sdists.glob(f"{module(name)}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if member.isfile()]
        return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in members}


def fields(metadata: bytes) -> Message:
    return Parser().parsestr(metadata.decode())


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_holds_licence_and_types(name: str, wheels: Path) -> None:
    files = read_wheel(wheels, name)
    assert files["licenses/LICENSE"] == LICENSE
    assert f"{module(name)}/py.typed" in files


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_says_who_made_it_and_what_for(name: str, wheels: Path) -> None:
    metadata = fields(read_wheel(wheels, name)["METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Author"] == "The npu developers"
    assert metadata["Keywords"]
    assert _set(metadata["Requires-Python"]) == _set(PYTHONS.get(name, ">=3.11"))
    classifiers = metadata.get_all("Classifier")
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_sdist_holds_licence_and_sources_and_nothing_that_was_built(name: str, sdists: Path) -> None:
    files = read_sdist(sdists, name)
    assert files["LICENSE"] == LICENSE
    assert fields(files["PKG-INFO"]).get_all("License-File") == ["LICENSE"]
    package = ROOT / "packages" / name
    sources = [*package.glob("src/**/*.py"), *package.glob("csrc/**/*.*"), *package.glob("CMakeLists.txt")]
    assert sources
    missing = {str(source.relative_to(package)) for source in sources} - files.keys()
    assert not missing
    assert not [file for file in files if file.startswith(("build/", ".")) and file != ".gitignore"]
    assert not [file for file in files if file.endswith((".so", ".o", ".pyc"))]


@pytest.mark.parametrize("name", [name for name in PACKAGES if name not in NATIVE])
def test_a_wheel_made_from_the_sdist_is_the_same(name: str, sdists: Path, wheels: Path, tmp_path: Path) -> None:
    (sdist,) = sdists.glob(f"{module(name)}-*.tar.gz")
    uv("build", "--no-config", "--wheel", "--out-dir", tmp_path, sdist)
    assert read_wheel(tmp_path, name) == read_wheel(wheels, name)


def test_the_native_packages_ask_for_the_same_compilers() -> None:
    asked = set()
    for name in NATIVE:
        text = (ROOT / "packages" / name / "CMakeLists.txt").read_text()
        (sentence,) = re.findall(rf'"{name} needs (GCC \d+ or Clang \d+ or newer)', text)
        assert re.findall(r"VERSION_GREATER_EQUAL (\d+)", text) == re.findall(r"\d+", sentence)
        asked.add(sentence)
    assert len(asked) == 1
    assert asked.pop() in (ROOT / "docs" / "getting_started" / "install.md").read_text()


def _set(specifiers: str) -> set[str]:
    return set(specifiers.split(","))
