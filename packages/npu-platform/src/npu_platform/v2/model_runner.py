"""NPUModelRunnerV2: the seams of vLLM's V2 model runner on npu; nothing of it is copied."""

from __future__ import annotations

import functools
import inspect
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.eplb_utils import step_eplb_after
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from npu_platform import compat
from npu_platform.dummy_kernels import LINEAR, launches_alone, of_dummy_run
from npu_platform.features import refuse_states_without_kernels
from npu_platform.graphs.capturing import without_collections
from npu_platform.graphs.wrapper import count_graphs
from npu_platform.kv_zeroing import BlockZeroer, caches_by_block
from npu_platform.v2.drafts import make_speculator
from npu_platform.v2.graphs import NPUModelGraphManager
from npu_platform.v2.outputs import (
    NPUAsyncOutput,
    NPUAsyncPoolingOutput,
    NPUDraftTokensHandler,
    NPUPPHandler,
    NPUStructuredOutputsWorker,
)
from npu_platform.v2.sampler import make_sampler
from npu_platform.weight_offload import create_offloader

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.npu_platform.v2.model_runner")


class NPUModelRunnerV2(GPUModelRunner):
    """vLLM's V2 runner with npu streams, npu graphs and buffers of npu."""

    # The methods of vLLM that make or use streams and graphs, with the decorators that they have there.
    _make = compat.with_npu_streams(
        GPUModelRunner.__init__,
        create_offloader=create_offloader,
        DraftTokensHandler=NPUDraftTokensHandler,
        PPHandler=NPUPPHandler,
        init_speculator=make_speculator,
    )
    _load_model = compat.reading(
        GPUModelRunner.load_model, Sampler=make_sampler, StructuredOutputsWorker=NPUStructuredOutputsWorker
    )
    _initialize_kv_cache = compat.reading(
        GPUModelRunner.initialize_kv_cache, ModelCudaGraphManager=NPUModelGraphManager
    )
    _capture_model = torch.inference_mode()(
        compat.reading(
            inspect.unwrap(GPUModelRunner.capture_model), freeze_gc_for_cudagraph_capture=without_collections
        )
    )
    sample_tokens = torch.inference_mode()(
        step_eplb_after()(compat.reading(inspect.unwrap(GPUModelRunner.sample_tokens), AsyncOutput=NPUAsyncOutput))
    )
    pool = torch.inference_mode()(
        step_eplb_after()(compat.reading(inspect.unwrap(GPUModelRunner.pool), AsyncPoolingOutput=NPUAsyncPoolingOutput))
    )

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Build vLLM's runner for `device`."""
        logger.info("npu runs vLLM's V2 model runner")
        with compat.buffers_of_npu():
            self._make(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; arguments are those of vLLM's runner."""
        with compat.buffers_of_npu(), compat.weights_in_host_memory():
            self._load_model(*args, **kwargs)
        with_drafts = self.speculative_config is not None
        refuse_states_without_kernels(self.compilation_config.static_forward_context, with_drafts)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches and what depends on them; arguments are those of vLLM's runner."""
        with compat.buffers_of_npu():
            self._initialize_kv_cache(*args, **kwargs)

    @functools.cached_property
    def main_stream(self) -> torch.Stream:  # type: ignore[override]  # vLLM's says CUDA
        """Return the stream that steps are computed on."""
        return torch.npu.current_stream(self.device)

    def load_lora_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Put adapters around the model's layers; arguments are those of vLLM's runner."""
        return compat.route_by_adapters(super().load_lora_model(*args, **kwargs))

    def models(self) -> list[torch.nn.Module]:
        """Return the model and, where another drafts for it, that one."""
        return [model for model in (self.get_model(), self.get_draft_model()) if model is not None]

    def capture_model(self, **kwargs: Any) -> int:
        """Capture the decode graphs; return the bytes that they hold."""
        before = time.perf_counter()
        with launches_alone(recorded=True):
            held = self._capture_model(**kwargs)
        graphs = count_graphs(self.vllm_config) + len(self.cudagraph_manager.graphs)
        logger.info(
            "npu graphs: %d captured in %.2f s, hold %.1f MiB", graphs, time.perf_counter() - before, held / 2**20
        )
        return held

    def _dummy_run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        with of_dummy_run(is_profile=kwargs.get("is_profile", False)):
            return super()._dummy_run(*args, **kwargs)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        with torch.npu.skip_kernels(*LINEAR):
            super()._dummy_sampler_run(hidden_states)

    def _init_kv_zero_meta(self) -> None:
        layers = self.compilation_config.static_forward_context
        groups = (group for groups in self.attn_groups for group in groups)
        caches = caches_by_block(groups, layers, (), self.kv_cache_config.num_blocks)
        self.kv_block_zeroer = BlockZeroer(caches, self.device)
