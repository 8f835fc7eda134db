"""NPUModelRunner: the seams of vLLM's V1 model runner on npu; nothing of it is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from npu_platform import compat
from npu_platform.config import NPUConfig
from npu_platform.features import refuse_states_without_kernels
from npu_platform.graphs.wrapper import NPUGraphWrapper

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


class NPUModelRunner(GPUModelRunner):
    """vLLM's V1 runner with npu streams, npu graphs, and npu-ops' sampler where it is installed."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Build vLLM's runner for `device`."""
        with compat.torch_cuda_streams_on_npu():
            super().__init__(vllm_config, device)
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

    def sample_tokens(self, *args: Any, **kwargs: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Sample from the last step's logits; asynchronous scheduling copies the result on an npu stream."""
        if not self.use_async_scheduling and not self.num_spec_tokens:
            return super().sample_tokens(*args, **kwargs)
        with compat.torch_cuda_streams_on_npu():
            return super().sample_tokens(*args, **kwargs)

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

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        # vLLM's own is a Triton kernel over raw addresses.
        blocks = torch.tensor(block_ids, device=self.device)
        # States of state-space layers are lists; a request's first tokens start from zero whatever is there.
        caches = {cache.data_ptr(): cache for cache in self.kv_caches if isinstance(cache, torch.Tensor)}
        for cache in caches.values():
            cache.index_fill_(0, blocks, 0)

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        # Streams are synchronous here, so the staged copy and its event would only cost time.
        return sampled_token_ids.tolist()
