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
from npu_platform.graphs.padding import counted, goes_by_tokens

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.input_batch import InputBuffers

    Forward = Callable[[CUDAGraphMode], None]

__all__ = ["NPUDraftGraphManager", "NPUModelGraphManager"]


class _OnNpu(CudaGraphManager):
    """Captures on npu. It comes after a manager of vLLM's among the bases, where that one's ``super()`` finds it."""

    _capture = torch.inference_mode()(
        compat.with_npu_streams(CudaGraphManager.capture, graph_capture=compat.no_graph_capture, tqdm=progress_bar)
    )

    _tokens: Tensor | None = None  # how many rows of a batch are no padding: one int32 on npu

    def capture(self, create_forward_fn: Callable[..., Forward], *args: Any, **kwargs: Any) -> None:
        """Capture graphs; the batch runs before once for each kind of graph, not for each number of requests."""
        factory = once_before(create_forward_fn)
        self._capture(factory if self._tokens is None else counting(factory, self._tokens), *args, **kwargs)


class NPUModelGraphManager(ModelCudaGraphManager, _OnNpu):
    """The graphs of the model, whose replays leave out rows of padding."""

    def capture(  # type: ignore[override]
        self, model: Module, model_state: Any, input_buffers: InputBuffers, *args: Any, **kwargs: Any
    ) -> None:
        """Capture graphs; arguments are those of vLLM's manager."""
        if goes_by_tokens(self.vllm_config):
            self._tokens = input_buffers.query_start_loc[-1:]  # also where a batch has fewer requests
        super().capture(model, model_state, input_buffers, *args, **kwargs)


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


def counting(create_forward_fn: Callable[..., Forward], tokens: Tensor) -> Callable[..., Forward]:
    """Return the same factory, whose full graphs read from `tokens` which of their rows are no padding."""

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Forward:
        forward = create_forward_fn(desc, warmup=warmup)
        if warmup or not desc.cg_mode.has_full_cudagraphs() or desc.num_ubatches > 1:
            return forward

        def counted_forward(mode: CUDAGraphMode) -> None:
            with counted(tokens, desc.num_tokens):
                forward(mode)

        return counted_forward

    return create


def _nothing(_mode: CUDAGraphMode) -> None:
    """Run no batch."""
