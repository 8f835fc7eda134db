"""Writes one version into the four distributions, the root, and the exact pins between them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomlkit

ROOT = Path(__file__).parent.parent
PACKAGES = ("npu-platform", "npu-ops", "npu-kvconnector", "npu-statlogger")


def main(version: str) -> None:
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.post\d+)?", version):
        sys.exit(f"A version looks like 0.32.1, 0.33.0rc1 or, for a fix of ours, 0.32.0.post1; got {version!r}.")
    for path in (ROOT / "pyproject.toml", *(ROOT / "packages" / name / "pyproject.toml" for name in PACKAGES)):
        document = tomlkit.parse(path.read_text())
        project = document["project"]
        project["version"] = version
        for extra in project.get("optional-dependencies", {}).values():
            for index, requirement in enumerate(extra):
                name, exact, _ = requirement.partition("==")
                if exact and name in PACKAGES:
                    extra[index] = f"{name}=={version}"
        path.write_text(tomlkit.dumps(document))
        print(f"{path.relative_to(ROOT)}: {version}")


if __name__ == "__main__":
    main(sys.argv[1])
