"""Quantised linear layers through vLLM's registries of kernels and of quantisation configurations, a format a file."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
