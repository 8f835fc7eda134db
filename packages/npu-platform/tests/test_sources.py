"""The quick way to a function's source finds what Python's own does."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import tokenize
import types
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor import ir, lowering

from npu_platform import sources

# Python's own: a test of this process may have begun the quick way and not left it.
EXACTLY = sources._exactly

LAYOUTS = '''
def of_one_line(x): return x


def of_one_line_that_goes_on(x): return x; \\
NAME = 1


def with_a_low_string():
    return """
low
"""


def with_low_brackets(x,
y
):
    return [
x,
y,
]


def with_a_comment_of_its_own(x):
    return x
    # its own


# not its own


def with_a_string_behind_its_code(x):
    """
Low.
    """
    def inner(y):
        return (
            y
        )
    return inner
    """
low
"""


class Holder:
    @staticmethod
    @(lambda f: f)
    def method(
        x: int,
    ) -> int:
        # first

        return x
    # behind

    def last(self):
        if self:
            return
        else:
            pass
'''


def functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yield the functions of a module and the methods of its classes, without those that were made up."""
    owners = [module, *(value for value in vars(module).values() if inspect.isclass(value))]
    for owner in owners:
        for value in vars(owner).values():
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType) and function.__code__.co_filename == module.__file__:
                yield function


@pytest.fixture
def layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    (tmp_path / "layouts_of_functions.py").write_text(LAYOUTS)
    spec = importlib.util.spec_from_file_location("layouts_of_functions", tmp_path / "layouts_of_functions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_functions_of_every_layout(layouts: types.ModuleType) -> None:
    found = list(functions(layouts))
    assert len(found) == 8
    for function in found:
        assert sources.getsourcelines(function) == EXACTLY(function)


def test_functions_of_the_library_and_most_of_them_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: list[object] = []
    monkeypatch.setattr(sources, "_exactly", lambda function: (slow.append(function), EXACTLY(function))[1])
    found = [f for module in (ast, inspect, tokenize, unittest.mock, ir, lowering) for f in functions(module)]
    for function in found:
        assert sources.getsourcelines(function) == EXACTLY(function), function
    assert len(slow) < len(found) / 5  # decorated ones are among them


def test_what_has_no_source_is_refused_as_python_does() -> None:
    namespace: dict[str, types.FunctionType] = {}
    exec("def made_up(): return 1", namespace)
    with pytest.raises(OSError, match="could not get source code|source code not available"):
        sources.getsourcelines(namespace["made_up"])
    assert sources.getsourcelines(Path) == EXACTLY(Path)
