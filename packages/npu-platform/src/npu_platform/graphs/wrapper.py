"""NPUGraphWrapper: captures one callable as a device graph per batch shape, and replays it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context, is_forward_context_available
from vllm.model_executor.offloader.base import get_offloader
from vllm.utils.torch_utils import weak_ref_tensors

from npu_platform.graphs.padding import counted, goes_by_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NPUGraphWrapper(CUDAGraphWrapper):
    """vLLM's graph wrapper with ``torch.npu.NPUGraph`` in place of ``torch.cuda.CUDAGraph``.

    It is a subclass because the V1 runner recognises its wrapped model by that class. Inputs are the runner's
    static buffers; outputs live in the shared graph pool and are valid until the next replay.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay, as the forward context says."""
        batch = self._batch_to_replay()
        if batch is None:
            return self.runnable(*args, **kwargs)
        entry = self.concrete_cudagraph_entries.get(batch)
        if entry is None:
            return self._capture(batch, args, kwargs)
        get_offloader().sync_prev_onload()
        entry.cudagraph.replay()
        return entry.output

    def _batch_to_replay(self) -> BatchDescriptor | None:
        if not is_forward_context_available():
            return None
        context = get_forward_context()
        mode = context.cudagraph_runtime_mode
        if mode in (CUDAGraphMode.NONE, None) or mode != self.runtime_mode:
            return None
        return context.batch_descriptor

    def _capture(self, batch: BatchDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        validate_cudagraph_capturing_enabled()
        graph = torch.npu.NPUGraph()
        get_offloader().sync_prev_onload()
        with self._without_padding(batch), torch.npu.graph(graph, pool=self.graph_pool):
            output = self.runnable(*args, **kwargs)
            get_offloader().join_after_forward()  # the next step's first weights are on their way
        entry = CUDAGraphEntry(batch_descriptor=batch, cudagraph=graph)
        # The graph's pool owns the output's memory; a strong reference here would keep it from being reused by
        # the graphs of the other batch sizes.
        entry.output = weak_ref_tensors(output)
        self.concrete_cudagraph_entries[batch] = entry
        return output

    def _without_padding(self, batch: BatchDescriptor) -> AbstractContextManager[None]:
        """Return what lets a replay leave out padding, where the step's metadata tell how many tokens there are."""
        by_layer = get_forward_context().attn_metadata
        if self.runtime_mode is not CUDAGraphMode.FULL or not isinstance(by_layer, dict):
            return nullcontext()
        starts = getattr(next(iter(by_layer.values()), None), "query_start_loc", None)
        if starts is None or not goes_by_tokens(self.vllm_config):
            return nullcontext()
        return counted(starts[-1:], batch.num_tokens)


def count_graphs(vllm_config: VllmConfig) -> int:
    """Return how many graphs an engine has captured in this process; a step of pieces has one for each."""
    wrappers = (wrapper for wrapper in CUDAGraphWrapper._all_instances if wrapper.vllm_config is vllm_config)
    return sum(len(wrapper.concrete_cudagraph_entries) for wrapper in wrappers)
