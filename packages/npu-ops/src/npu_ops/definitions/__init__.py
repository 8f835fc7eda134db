"""The ops, one file a family: schema, meta function and plain-torch reference; importing this defines them all."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
