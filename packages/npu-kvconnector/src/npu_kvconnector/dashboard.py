"""The Grafana dashboard that comes with this package."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["text_of_dashboard"]


def text_of_dashboard() -> str:
    """Return the dashboard as JSON to import."""
    return files("npu_kvconnector").joinpath("assets", "grafana.json").read_text(encoding="utf-8")
