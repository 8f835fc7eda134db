"""Becomes `sitecustomize` beside an npu-ops of another build (see noxfile.py): takes it before the editable one."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Beside:
    """Finds npu_ops in the folder of this file."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return where the module is, None for any other package."""
        if name.partition(".")[0] != "npu_ops":
            return None
        return PathFinder.find_spec(name, path or [str(Path(__file__).parent)])


# An editable package has a finder too, which was there first.
sys.meta_path.insert(0, Beside)  # type: ignore[arg-type]
