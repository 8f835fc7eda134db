from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGES = sorted((Path(__file__).parents[2] / "packages").iterdir())
MODULES = {package.name: package.name.replace("-", "_") for package in PACKAGES}


@pytest.mark.parametrize("name", MODULES)
def test_siblings_meet_without_imports(name: str) -> None:
    """Each distribution is useful alone: they meet through torch.ops, entry points and vLLM's registries."""
    sources = sorted((Path(__file__).parents[2] / "packages" / name / "src").rglob("*.py"))
    assert sources
    others = set(MODULES.values()) - {MODULES[name]}
    found = [f"{path.name} imports {module}" for path in sources for module in imported(path) if module in others]
    assert found == []


def imported(path: Path) -> set[str]:
    """Return the first names of what a source imports, wherever it does."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return modules
