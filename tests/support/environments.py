"""Environments that tests make with uv: install wheels into them, list what they hold, run Python in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PACKAGES", "ROOT", "Environment", "add_distribution", "find_links", "run", "uv"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("npu-platform", "npu-ops", "npu-kvconnector", "npu-statlogger")

_OURS = ("NPU_", "VLLM_", "PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own."""

    place: Path

    @classmethod
    def create(cls, place: Path) -> Environment:
        """Make an empty environment for the Python that runs the tests."""
        uv("venv", "--quiet", place)
        return cls(place)

    @property
    def python(self) -> Path:
        """Return the interpreter."""
        return self.place / "bin" / "python"

    def install(self, *requirements: str | Path, wheels: Path | None = None) -> None:
        """Install as a user would, without this workspace's settings; `wheels` is searched beside the index."""
        links = [str(wheels)] if wheels else []
        uv("pip", "install", "--no-config", "--python", self.python, *_links(links), *requirements)

    def uninstall(self, name: str) -> None:
        """Take a distribution out again; what it brought stays."""
        uv("pip", "uninstall", "--python", self.python, name)

    def install_locked_torch(self) -> None:
        """Install the locked version of torch, from PIP_FIND_LINKS or UV_FIND_LINKS where it is there."""
        versions = {package["name"]: package["version"] for package in _lock()["package"]}
        uv(
            "pip",
            "install",
            "--no-config",
            "--python",
            self.python,
            *_links(find_links()),
            f"torch=={versions['torch']}",
            "numpy",
        )

    def install_locked_vllm(self) -> None:
        """Install vLLM and all that it needs as uv.lock says, with this workspace's way of building it."""
        export = ("export", "--locked", "--quiet", "--package", "npu-statlogger", "--extra", "vllm")
        locked = uv(*export, "--no-default-groups", "--no-emit-workspace", "--no-hashes").stdout
        requirements = self.place / "locked.txt"
        requirements.write_text(locked)
        # This workspace's settings would compile 25,000 files, of which a test imports a few hundred.
        uv("pip", "install", "--no-compile-bytecode", "--python", self.python, "--requirements", requirements)

    def versions(self) -> dict[str, str]:
        """Return the version of each installed distribution."""
        listed = uv("pip", "list", "--format", "json", "--python", self.python).stdout
        return {row["name"]: row["version"] for row in json.loads(listed)}

    def run(self, code: str, *, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run Python code without the settings of the calling process; see `run`."""
        return run(self.python, "-c", code, check=check, **environ)

    def script(
        self, name: str, *arguments: str, check: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run an installed command; see `run`."""
        return run(self.place / "bin" / name, *arguments, check=check, **environ)


def run(*command: str | Path, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the repository, without settings of ours or of vLLM except those given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    result = subprocess.run(
        [str(part) for part in command],
        env={**inherited, **environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if check and result.returncode:
        msg = f"{command} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
        raise AssertionError(msg)
    return result


def uv(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run uv in the repository's root."""
    environ = {name: value for name, value in os.environ.items() if name not in _OURS}
    command = ["uv", *map(str, arguments)]
    result = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    if result.returncode:
        msg = f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr}"
        raise AssertionError(msg)
    return result


def add_distribution(site: Path, name: str, version: str, entry_points: str = "", **modules: str) -> None:
    """Put an installed distribution (metadata and modules) into a folder that a test puts on PYTHONPATH."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


def find_links() -> list[str]:
    """Return the places that the user told pip or uv to find wheels in."""
    return [
        place
        for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS")
        for place in re.split(r"[ ,]+", os.environ.get(name, ""))
        if place
    ]


def _links(places: list[str]) -> list[str]:
    return [part for place in places for part in ("--find-links", place)]


def _lock() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads((ROOT / "uv.lock").read_text())
