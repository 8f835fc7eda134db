"""Built wheels, and clean environments to install them into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.environments import PACKAGES, ROOT, Environment, uv

if TYPE_CHECKING:
    from pathlib import Path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheels", help="folder of wheels built before, instead of building them (nox -s build)")


@pytest.fixture(scope="session")
def wheels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds one wheel of each distribution."""
    given = request.config.getoption("--wheels")
    folder = ROOT / given if given else tmp_path_factory.mktemp("wheels")
    if not given:
        uv("build", "--no-config", "--all-packages", "--wheel", "--out-dir", folder)
    assert len(list(folder.glob("*.whl"))) == 4
    return folder


@pytest.fixture(scope="session")
def sdists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds one sdist of each distribution."""
    folder = tmp_path_factory.mktemp("sdists")
    for name in PACKAGES:
        # By the backend itself: what building the wheel requires, a torch among it, is not needed for this.
        building = ("run", "--no-project", "--with", "hatchling", "--directory", f"packages/{name}")
        uv(*building, "python", "-m", "hatchling", "build", "--target", "sdist", "--directory", folder)
    assert len(list(folder.glob("*.tar.gz"))) == 4
    return folder


@pytest.fixture(scope="session")
def with_vllm(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with torch and vLLM as locked and nothing of ours."""
    environment = Environment.create(tmp_path_factory.mktemp("vllm") / "venv")
    environment.install_locked_vllm()
    return environment
