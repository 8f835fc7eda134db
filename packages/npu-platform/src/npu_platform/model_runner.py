"""NPUModelRunner: the seams of vLLM's V1 model runner on npu; nothing of it is copied."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

from npu_platform import compat
from npu_platform.config import NPUConfig
from npu_platform.dummy_kernels import LINEAR, of_dummy_run
from npu_platform.features import refuse_states_without_kernels
from npu_platform.graphs.capturing import progress_bar, without_collections
from npu_platform.graphs.drafting import NPUDraftModelProposer, NPUEagleProposer
from npu_platform.graphs.wrapper import NPUGraphWrapper, count_graphs
from npu_platform.kv_zeroing import BlockZeroer, caches_by_block
from npu_platform.weight_offload import create_offloader

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.outputs import SamplerOutput


logger = init_logger("vllm.npu_platform.model_runner")


class NPUAsyncOutput(AsyncGPUModelRunnerOutput):
    """vLLM's output of a step whose copy to the host is under way, on an npu stream."""

    __init__ = compat.with_npu_streams(AsyncGPUModelRunnerOutput.__init__)


_SAMPLING = ("npu_ops::top_k_top_p", "npu_ops::random_sample", "npu_ops::argmax")


class NPUModelRunner(GPUModelRunner):
    """vLLM's V1 runner with npu streams, npu graphs, and npu-ops' sampler where it is installed."""

    # The methods of vLLM that make or use streams, with the decorators that they have there.
    _make = JitWarmupRegistry.capture(
        compat.with_npu_streams(
            GPUModelRunner.__init__,
            create_offloader=create_offloader,
            DraftModelProposer=NPUDraftModelProposer,
            EagleProposer=NPUEagleProposer,
        )
    )
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
        self._warmed_up: set[tuple[CUDAGraphMode, bool, int]] = set()
        self._has_states = self.model_config.is_hybrid or self.model_config.is_attention_free
        config = NPUConfig.from_additional_config(vllm_config.additional_config)
        if config.sampler == "npu_ops" and hasattr(torch.ops.npu_ops, "top_k_top_p"):
            from npu_platform.sampling.sampler import NPUSampler

            self.sampler = NPUSampler(
                logprobs_mode=self.model_config.logprobs_mode, use_fp64_gumbel=self.model_config.use_fp64_gumbel
            )
            if hasattr(self, "rejection_sampler"):
                from npu_platform.sampling.rejection import NPURejectionSampler

                self.rejection_sampler = NPURejectionSampler(self.sampler, self.speculative_config, self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then put npu graphs in the place of the CUDA ones; arguments are those of vLLM's runner."""
        with compat.weights_in_host_memory():
            super().load_model(*args, **kwargs)
        with_drafts = self.speculative_config is not None
        refuse_states_without_kernels(self.compilation_config.static_forward_context, with_drafts)
        if type(self.model) is CUDAGraphWrapper:
            self.model = NPUGraphWrapper(self.model.runnable, self.vllm_config, self.model.runtime_mode)

    def load_lora_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Put adapters around the model's layers; arguments are those of vLLM's runner."""
        return compat.route_by_adapters(super().load_lora_model(*args, **kwargs))

    def models(self) -> list[torch.nn.Module]:
        """Return the model and, where another drafts for it, that one."""
        drafter = getattr(getattr(self, "drafter", None), "model", None)
        drafter = drafter.unwrap() if isinstance(drafter, CUDAGraphWrapper) else drafter
        return [self.get_model(), *([drafter] if isinstance(drafter, torch.nn.Module) else [])]

    _capture_cudagraphs = compat.reading(GPUModelRunner._capture_cudagraphs, tqdm=progress_bar)

    def _warmup_and_capture(
        self, desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> None:
        # What layers make at their first run must not lie in a graph's memory. The largest batch of a kind comes first.
        kind = (cudagraph_runtime_mode, desc.uniform, desc.num_active_loras)
        warm = {"num_warmups": 0} if kind in self._warmed_up else {}
        self._warmed_up.add(kind)
        super()._warmup_and_capture(desc, cudagraph_runtime_mode, *args, **kwargs | warm)

    def capture_model(self) -> int:
        """Capture the decode graphs; return the bytes that they hold."""
        before = time.perf_counter()
        with compat.graph_capture_on_npu():
            held = super().capture_model()
        took, graphs = time.perf_counter() - before, count_graphs(self.vllm_config)
        logger.info("npu graphs: %d captured in %.2f s, hold %.1f MiB", graphs, took, held / 2**20)
        return held

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        # vLLM tells a decode by its number of tokens, but a prompt, or a part of one, may have as many. Graphs take it
        # for a request that has a state, and with drafts for one whose tokens may not count.
        if self._has_states and kwargs.get("force_uniform_decode") is None:
            computed = self.input_batch.num_computed_tokens_cpu[:num_reqs]
            prompts = computed == 0
            if self.num_spec_tokens:
                prompts |= self.input_batch.num_tokens_no_spec[:num_reqs] > computed + 1
            kwargs["force_eager"] = kwargs.get("force_eager", False) or bool(prompts.any())
        return super()._determine_batch_execution_and_padding(num_tokens, num_reqs, *args, **kwargs)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self._has_states and self.input_batch.num_reqs > 0:
            # Between the steps of requests, as beside replicas that are paused. vLLM tells a graph's decodes by the
            # prompts of the requests that wait, and the graph would write states where the last decodes had theirs.
            kwargs.setdefault("cudagraph_runtime_mode", CUDAGraphMode.NONE)
        options = {name: kwargs[name] for name in ("is_graph_capturing", "is_profile") if name in kwargs}
        with of_dummy_run(**options):
            return super()._dummy_run(*args, **kwargs)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with torch.npu.skip_kernels(*LINEAR, *_SAMPLING):
            return super()._dummy_sampler_run(hidden_states)

    def _freeze_gc(self) -> contextlib.AbstractContextManager[None]:
        return without_collections()

    def _sample(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        # A token that is not wanted yet, since its prompt goes on, takes no number from its request's seed.
        before = {row: generator.get_state() for row, generator in self._generators_of_unwanted_tokens().items()}
        output = super()._sample(*args, **kwargs)
        for row, state in before.items():
            self.input_batch.generators[row].set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # vLLM turns these generators back here, by an offset that CUDA's have.
        turned_back = self._generators_of_unwanted_tokens()
        for row in turned_back:
            del self.input_batch.generators[row]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(turned_back)

    def _generators_of_unwanted_tokens(self) -> dict[int, torch.Generator]:
        """Return the generators of seeded requests whose sampled token is dropped, by row of the batch."""
        unwanted = self.discard_request_mask.np
        return {row: generator for row, generator in self.input_batch.generators.items() if unwanted[row]}

    def _init_kv_zero_meta(self) -> None:
        layers = self.compilation_config.static_forward_context
        groups, blocks = self._kv_cache_spec_attn_group_iterator(), self.kv_cache_config.num_blocks
        caches = caches_by_block(groups, layers, self.runner_only_attn_layers, blocks)
        self._zeroer = BlockZeroer(caches, self.device)

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        self._zeroer.zero_block_ids(block_ids)

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        # Streams are synchronous here, so the staged copy and its event would only cost time.
        return sampled_token_ids.tolist()
