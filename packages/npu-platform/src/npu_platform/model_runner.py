"""NPUModelRunner: the seams of vLLM's V1 model runner on npu; nothing of it is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

from npu_platform import compat
from npu_platform.config import NPUConfig
from npu_platform.features import refuse_states_without_kernels
from npu_platform.graphs.wrapper import NPUGraphWrapper
from npu_platform.kv_zeroing import caches_by_block

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NPUAsyncOutput(AsyncGPUModelRunnerOutput):
    """vLLM's output of a step whose copy to the host is under way, on an npu stream."""

    __init__ = compat.with_npu_streams(AsyncGPUModelRunnerOutput.__init__)


class NPUModelRunner(GPUModelRunner):
    """vLLM's V1 runner with npu streams, npu graphs, and npu-ops' sampler where it is installed."""

    # The methods of vLLM that make or use streams, with the decorators that they have there.
    _make = JitWarmupRegistry.capture(compat.with_npu_streams(GPUModelRunner.__init__))
    sample_tokens = torch.inference_mode()(
        compat.with_npu_streams(GPUModelRunner.sample_tokens, AsyncGPUModelRunnerOutput=NPUAsyncOutput)
    )
    _get_or_create_async_output_copy_stream = compat.with_npu_streams(
        GPUModelRunner._get_or_create_async_output_copy_stream
    )
    _copy_draft_token_ids_to_cpu = compat.with_npu_streams(GPUModelRunner._copy_draft_token_ids_to_cpu)
    _copy_valid_sampled_token_count = compat.with_npu_streams(GPUModelRunner._copy_valid_sampled_token_count)

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Build vLLM's runner for `device`."""
        self._make(vllm_config, device)
        self._has_states = self.model_config.is_hybrid or self.model_config.is_attention_free
        config = NPUConfig.from_additional_config(vllm_config.additional_config)
        if config.sampler == "npu_ops" and hasattr(torch.ops.npu_ops, "top_k_top_p"):
            from npu_platform.sampling.sampler import NPUSampler

            self.sampler = NPUSampler(
                logprobs_mode=self.model_config.logprobs_mode, use_fp64_gumbel=self.model_config.use_fp64_gumbel
            )
            if hasattr(self, "rejection_sampler"):
                self.rejection_sampler.sampler = self.sampler

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then put npu graphs in the place of the CUDA ones; arguments are those of vLLM's runner."""
        super().load_model(*args, **kwargs)
        refuse_states_without_kernels(self.compilation_config.static_forward_context)
        if type(self.model) is CUDAGraphWrapper:
            self.model = NPUGraphWrapper(self.model.runnable, self.vllm_config, self.model.runtime_mode)

    def capture_model(self) -> int:
        """Capture the decode graphs; return the bytes that they hold."""
        with compat.graph_capture_on_npu():
            return super().capture_model()

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        # vLLM tells a decode by its one token, but a prompt of one token has no state yet, which no graph knows.
        if self._has_states and kwargs.get("force_uniform_decode") is None:
            begins = bool((self.input_batch.num_computed_tokens_cpu[:num_reqs] == 0).any())
            kwargs["force_eager"] = kwargs.get("force_eager", False) or begins
        return super()._determine_batch_execution_and_padding(num_tokens, num_reqs, *args, **kwargs)

    def _dummy_run(self, *args: Any, is_profile: bool = False, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # The memory profile wants the allocations of the largest batch. Its time is that of the linear layers; vLLM
        # itself expects any values in what comes out.
        skipped = ("npu_ops::linear", "aten::linear") if is_profile else ()
        with torch.npu.skip_kernels(*skipped):
            return super()._dummy_run(*args, is_profile=is_profile, **kwargs)

    def _init_kv_zero_meta(self) -> None:
        layers = self.compilation_config.static_forward_context
        groups, blocks = self._kv_cache_spec_attn_group_iterator(), self.kv_cache_config.num_blocks
        self._caches_by_block = caches_by_block(groups, layers, self.runner_only_attn_layers, blocks)

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        # vLLM's own is a Triton kernel over raw addresses.
        blocks = torch.tensor(block_ids, device=self.device)
        for cache in self._caches_by_block:
            cache.index_fill_(0, blocks, 0)

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        # Streams are synchronous here, so the staged copy and its event would only cost time.
        return sampled_token_ids.tolist()
