"""vLLM's layer classes on the ops, one file a family; importing a file registers its classes with vLLM."""

from __future__ import annotations

import importlib
import pkgutil


def register_all() -> None:
    """Import every file of this folder; layers for which another plugin has registered a class keep it. Needs vLLM."""
    from npu_ops import compat

    with compat.layers_of_others():
        for module in pkgutil.iter_modules(__path__):
            importlib.import_module(f"{__name__}.{module.name}")
