"""Owns graphs: capture of what a thread launches, and replay without Python."""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Literal

import torch

from npu_platform import _C

from .devices import synchronize
from .streams import StreamContext

PoolHandle = tuple[int, int]
ErrorMode = Literal["default", "global", "thread_local", "relaxed"]

__all__ = [
    "NPUGraph",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
]


def is_current_stream_capturing() -> bool:
    """Return whether this thread captures what it launches on its current stream."""
    return _C.is_capturing()


def graph_pool_handle() -> PoolHandle:
    """Return the handle of a new memory pool that several graphs can share."""
    return (0, _C.new_pool_id())


class NPUGraph(torch.accelerator.Graph):
    """A ``torch.accelerator.Graph`` whose ``capture_begin`` takes the pool, as ``torch.cuda.CUDAGraph`` does."""

    def capture_begin(self, pool: PoolHandle | None = None, capture_error_mode: ErrorMode = "global") -> None:
        """Begin to capture.

        Args:
            pool: memory of ``graph_pool_handle()`` or of another graph's ``pool()``; by default the graph's own.
            capture_error_mode: accepted for the signature's sake: only the capturing thread is restricted.
        """
        del capture_error_mode
        if pool is not None:
            self.graph_pool = pool
        super().capture_begin()


class graph:  # noqa: N801 - the name in torch.cuda
    """Context manager that captures into a graph.

    Args:
        npu_graph: the graph to fill.
        pool: memory to share with other graphs.
        stream: the stream to capture on, by default the current one.
        capture_error_mode: accepted for the signature's sake.
    """

    def __init__(
        self,
        npu_graph: torch.accelerator.Graph,
        pool: PoolHandle | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: ErrorMode = "global",
    ) -> None:
        del capture_error_mode
        self.npu_graph = npu_graph
        self.pool = pool
        self.stream_context = StreamContext(stream)

    def __enter__(self) -> None:
        """Begin to capture; garbage goes first where torch.compiler.config.force_cudagraph_gc says so, as on cuda."""
        synchronize()
        if torch.compiler.config.force_cudagraph_gc:
            gc.collect()
        self.stream_context.__enter__()
        try:
            if self.pool is not None:
                self.npu_graph.graph_pool = self.pool
            self.npu_graph.capture_begin()
        except BaseException:
            self.stream_context.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the capture; an error of the captured code goes before one of its end."""
        try:
            self.npu_graph.capture_end()
        except RuntimeError:
            if error is None:
                raise
        finally:
            self.stream_context.__exit__(kind, error, trace)
