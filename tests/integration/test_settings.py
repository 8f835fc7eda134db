"""Every field of vLLM's configuration works on npu, is refused by name, or means nothing to a device: settings.toml.

A field that vLLM adds or drops fails here by name. What is refused is asked for in test_refusals.py.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, get_args

import pytest
import vllm.config
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from tests.support import settings_page
from tests.support.environments import ROOT
from tests.support.settings_page import TABLE, entries, is_class

if TYPE_CHECKING:
    from collections.abc import Iterator

# Fields of EngineArgs that their own class has by the same name; a field of another class, such as a draft model's
# attention_backend, does not stand for one of EngineArgs.
BEHIND_ENGINE_ARGS = (
    "AttentionConfig", "AuxOutputConfig", "CacheConfig", "CompilationConfig", "KernelConfig", "LoRAConfig", "LoadConfig",
    "LoggingConfig", "ModelConfig", "MultiModalConfig", "ObservabilityConfig", "OffloadConfig", "ParallelConfig",
    "PrefetchOffloadConfig", "SchedulerConfig", "StructuredOutputsConfig", "UVAOffloadConfig", "VllmConfig",
)  # fmt: skip


def config_classes(cls: type = vllm.config.VllmConfig) -> dict[str, type]:
    """Return VllmConfig and the classes of vLLM's configuration that its fields hold, and theirs."""
    found, ahead = {}, [cls]
    while ahead:
        cls = ahead.pop()
        if cls.__name__ not in found:
            found[cls.__name__] = cls
            ahead += [held for field in fields(cls) for held in held_by(cls, field)]
    return found


def fields(cls: type) -> list[str]:
    """Return what a user may set: private fields, and those that vLLM fills in, are its own."""
    return [field.name for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]


def held_by(cls: type, field: str) -> list[type]:
    """Return the classes of vLLM's configuration in a field's type."""
    types, found = [cls.__pydantic_fields__[field].annotation], []
    while types:
        one = types.pop()
        types += get_args(one)
        if isinstance(one, type) and dataclasses.is_dataclass(one) and one.__module__.startswith("vllm.config."):
            found.append(one)
    return found


def all_fields() -> dict[str, bool]:
    """Return `class.field` of every field, and whether its meaning must be decided: of a class that it holds, all are."""
    classes = config_classes()
    found = {f"{name}.{field}": not held_by(cls, field) for name, cls in classes.items() for field in fields(cls)}
    known = {field for name in BEHIND_ENGINE_ARGS for field in fields(classes[name])}
    for cls in (AsyncEngineArgs, EngineArgs):
        found |= {f"{cls.__name__}.{field}": True for field in own_fields(cls) if field not in known}
    return found


def own_fields(cls: type) -> list[str]:
    return [field for field in fields(cls) if field in vars(cls).get("__annotations__", {})]


def decided() -> Iterator[str]:
    for kind in ("works", "refused", "host"):
        for entry in entries(kind):
            yield from (f"{name}.{field}" for name in entry if is_class(name) for field in entry[name])


def test_every_field_is_decided_once() -> None:
    known, table = all_fields(), Counter(decided())
    assert [field for field in known if known[field] and field not in table] == [], "fields that nobody decided"
    assert [field for field in table if field not in known] == [], "fields that vLLM does not have"
    assert sorted(field for field, times in table.items() if times > 1) == [], "fields decided twice"


@pytest.mark.parametrize("test", sorted({entry["test"] for entry in TABLE["works"]}))
def test_what_works_has_a_test(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("entry", TABLE["works"], ids=lambda entry: entry["test"])
def test_what_works_is_tried_by_its_test(entry: dict[str, Any]) -> None:
    """The test's file, or what it takes from tests/support, names each field, or that of EngineArgs which ends so."""
    text = ROOT.joinpath(entry["test"].partition("::")[0]).read_text()
    taken = re.findall(r"^from tests\.support(?:\.(\w+))? import (.+)$", text, re.MULTILINE)
    names = {name for module, them in taken for name in ([module] if module else re.findall(r"(?:^|, )(\w+)", them))}
    text += "".join((ROOT / f"tests/support/{name}.py").read_text() for name in sorted(names))
    unset, fields = set(entry.get("unset", ())), {field for name in entry if is_class(name) for field in entry[name]}
    said = {field for field in fields if re.search(rf"\b{field}\b|--{field.replace('_', '-')}\b", text)}
    missing = {field for field in fields - said if not any(name.endswith(f"_{field}") for name in said)}
    assert missing == unset


def test_the_page_is_current() -> None:
    page = ROOT / "docs" / "reference" / "settings.md"
    assert page.read_text() == settings_page.text(), (
        "python -m tests.support.settings_page > docs/reference/settings.md"
    )
