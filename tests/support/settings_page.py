"""Reads tests/integration/settings.toml, and writes docs/reference/settings.md from it.

python -m tests.support.settings_page > docs/reference/settings.md
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from typing import TYPE_CHECKING, Any

from tests.support.environments import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE: dict[str, list[dict[str, Any]]] = tomllib.loads((ROOT / "tests/integration/settings.toml").read_text())
NEXT: dict[str, list[dict[str, Any]]] = tomllib.loads((ROOT / "tests/integration/settings_next.toml").read_text())
"""What vLLM 0.33 alone has; the page is of 0.32."""

_HEAD = """# Settings of vLLM

What vLLM's settings do on npu. A setting that is not named here works, or is read on the host alone. What is refused
stops the start with the sentence beside it, which names the way out; what stands behind a variable is refused where that
is set, as on the V1 model runner, and works otherwise.

Made from `tests/integration/settings.toml`, where every field of vLLM's configuration is, by
`python -m tests.support.settings_page`.

## Refused

| settings | what the refusal says |
|---|---|
"""
_WITHOUT_EFFECT = """
## Without effect on the device

| settings | why |
|---|---|
"""


def is_class(key: str) -> bool:
    """Say whether a key of an entry is a class of vLLM's configuration."""
    return key[0].isupper()


def refused() -> dict[str, dict[str, Any]]:
    """Return what is refused, each by the arguments that ask for it."""
    return {json.dumps(entry["given"]): entry for entry in entries("refused")}


def entries(kind: str) -> list[dict[str, Any]]:
    """Return the entries of a kind, with those of vLLM 0.33 where it is that."""
    import vllm.config

    return TABLE[kind] + (NEXT.get(kind, []) if hasattr(vllm.config, "WatchdogConfig") else [])


def text() -> str:
    """Return the page."""
    return "".join([_HEAD, *_rows("refused", "sentence"), _WITHOUT_EFFECT, *_rows("host", "reason")])


def _rows(kind: str, why: str) -> Iterator[str]:
    for entry in TABLE[kind]:
        names = [f"`{name}.{field}`" for name in entry if is_class(name) for field in entry[name]]
        more = [f"with `{name}={value}`" for name, value in entry.get("environ", {}).items()]
        more += [entry["of"]] if "of" in entry else []
        yield f"| {', '.join(more + names)} | {_plain(entry[why])} |\n"


def _plain(sentence: str) -> str:
    return re.sub(r"\.\*", " ... ", sentence).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(text())
