"""What vLLM has no seam for; each function says why, for which versions, and which test fails once it is not needed."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerManager

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["managers_without_plugins"]


def managers_without_plugins(engines: Iterable[int]) -> list[StatLoggerManager]:
    """Return the managers of loggers that replaced one of `engines` when their number grew.

    vLLM 0.32's AsyncLLM.scale_elastic_ep makes a new manager with `custom_stat_loggers=None`, so that the loggers of
    plugins end without a word, and tells nobody. The new one is found among the living objects; its list of loggers is
    public. tests/test_compat.py reads vLLM's source and fails when a new manager gets the plugins itself.
    """
    known = set(engines)
    managers = (each for each in gc.get_objects() if type(each) is StatLoggerManager)
    return [manager for manager in managers if set(getattr(manager, "engine_indexes", ())) > known]
