"""The main job in small: a model of a few MB that ships with the project, and the command that asks it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL"]

MODEL = Path(__file__).parent / "model"
"""Folder of the demo model: a Qwen3 checkpoint in bfloat16, made by ``python -m npu_platform.demo.train``."""
