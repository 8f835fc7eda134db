"""Statistics of a vLLM server with true percentiles; the entry point is the class, `attach` is for an offline `LLM`.

Importing this package needs no vLLM: the logger class is built on first use, because its base class is vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_statlogger.logger import NPUStatLogger, attach

__all__ = ["NPUStatLogger", "attach"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        from npu_statlogger import logger
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        msg = (
            f"npu_statlogger.{name} is of a vLLM logger and vLLM is not installed in this environment; "
            "install vLLM 0.32 or 0.33 first (`npu-stat` works without it)."
        )
        raise ImportError(msg) from error
    return getattr(logger, name)
