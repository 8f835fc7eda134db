"""The V2 runner's graphs: vLLM's managers, which capture and replay ``torch.npu.NPUGraph``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from npu_platform import compat
from npu_platform.graphs.capturing import progress_bar

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    Forward = Callable[[CUDAGraphMode], None]

__all__ = ["NPUDraftGraphManager", "NPUModelGraphManager"]


class _OnNpu(CudaGraphManager):
    """Captures on npu. It comes after a manager of vLLM's among the bases, where that one's ``super()`` finds it."""

    _capture = torch.inference_mode()(
        compat.with_npu_streams(CudaGraphManager.capture, graph_capture=compat.no_graph_capture, tqdm=progress_bar)
    )

    def capture(self, create_forward_fn: Callable[..., Forward], *args: Any, **kwargs: Any) -> None:
        """Capture graphs; the batch runs before once for each kind of graph, not for each number of requests."""
        self._capture(once_before(create_forward_fn), *args, **kwargs)


class NPUModelGraphManager(ModelCudaGraphManager, _OnNpu):
    """The graphs of the model."""


class NPUDraftGraphManager(SpeculatorCudaGraphManager, _OnNpu):
    """The graphs of a model that drafts."""


def once_before(create_forward_fn: Callable[..., Forward]) -> Callable[..., Forward]:
    """Return the same factory, but that the first full graph of a kind alone has a run before its capture.

    That one is of the largest batch: vLLM makes the buffers of what comes out in it, outside of a graph's memory. The
    others are to find their kernels compiled, as they are after it and the warm-up.
    """
    run: set[BatchExecutionDescriptor] = set()

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Forward:
        kind = replace(desc, num_tokens=0, num_reqs=0)
        if warmup and desc.cg_mode.has_full_cudagraphs() and kind in run:
            return _nothing
        run.add(kind)
        return create_forward_fn(desc, warmup=warmup)

    return create


def _nothing(_mode: CUDAGraphMode) -> None:
    """Run no batch."""
