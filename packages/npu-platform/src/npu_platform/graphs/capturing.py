"""What both runners of vLLM have around their captures: a progress bar, and garbage that nobody looks for."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar", "without_collections"]


def progress_bar(batches: list[Any], *, desc: str, **options: Any) -> Any:
    """Return vLLM's progress bar over the batches to capture, with the device's name."""
    return tqdm(batches, desc=desc.replace("CUDA", "npu"), **options)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from running.

    vLLM's own contexts unfreeze afterwards what NPUWorker has frozen, and look through all of it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
