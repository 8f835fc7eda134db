"""Drafters of vLLM's V1 runner whose passes are graphs of the device; nothing of vLLM's loop over the drafts is copied.

vLLM has graphs of pieces for a drafter, with attention between them, and so wants it compiled. Attention of npu reads
all that changes by step on the device, so that a pass is one graph: the first, over the tokens of the target's step, as
well as those after it, with one token for each request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from npu_platform.attention.backend import NPUMetadataBuilder
from npu_platform.graphs.wrapper import NPUGraphWrapper

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["NPUDraftModelProposer", "NPUEagleProposer"]


class _Recorded(NamedTuple):
    """What the attention of a graph reads: as vLLM's proposer wants it, and how many requests it has room for."""

    by_group: list[object]
    by_layer: dict[str, object]
    requests: int


class _AtParts:
    """The runner's batch, of whose requests in the middle of their prompts the tokens end with the next one.

    vLLM takes the last of all tokens, a prompt's last, and a head that is given it there drafts worse.
    """

    def __init__(self, batch: Any, runner: Any) -> None:
        self._batch = batch
        in_part = runner.discard_request_mask.np[: batch.num_reqs]
        ends = runner.optimistic_seq_lens_cpu[: batch.num_reqs].numpy() + 1
        self.num_tokens_no_spec = np.where(in_part, ends, batch.num_tokens_no_spec[: batch.num_reqs])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


class _DraftGraphs(NPUGraphWrapper, BreakableCUDAGraphWrapper):
    """A drafter's model; replays a pass where attention reads what its graph does.

    vLLM's proposers look through the second class, whose own graphs are of CUDA, where they ask what a model is.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig) -> None:
        super().__init__(model, vllm_config, CUDAGraphMode.PIECEWISE)  # the one that vLLM's drafters know
        self.recorded: dict[int, _Recorded] = {}

    def _batch_to_replay(self) -> BatchDescriptor | None:
        batch = super()._batch_to_replay()
        recorded = None if batch is None else self.recorded.get(batch.num_tokens)
        if recorded is None or get_forward_context().attn_metadata is not recorded.by_layer:
            return None
        return batch


class _Graphed(SpecDecodeBaseProposer):
    """A proposer with graphs where the attention of its model can be in one."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner=runner)
        self._runner = runner

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: torch.Tensor, requests: Any, gpu_input_batch: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that drafts go on from: as vLLM does, but after a part of a prompt the token after it."""
        batch = _AtParts(gpu_input_batch, self._runner)
        return super().prepare_next_token_ids_padded(sampled_token_ids, requests, batch, *args, **kwargs)

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Find the drafter's layers, as vLLM does, and make what its graphs read; called anew for each KV cache."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        if not self._can_be_recorded():
            return
        if not isinstance(self.model, _DraftGraphs):
            self.model = _DraftGraphs(self.model, self.vllm_config)
        self.model.recorded.clear()
        self._starts = torch.zeros(self.max_batch_size + 1, dtype=torch.int32, device=self.device)
        self._lengths = torch.zeros(self.max_batch_size, dtype=torch.int32, device=self.device)

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Run without a batch, as vLLM does; where the runner captures, capture a pass of so many tokens afterwards."""
        super().dummy_run(num_tokens, use_cudagraphs, is_graph_capturing, slot_mappings)
        if is_graph_capturing and isinstance(self.model, _DraftGraphs):
            self._record(num_tokens)

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        """Return what attention reads in the next pass: of its graph, if there is one."""
        recorded = self._recorded_for(common_attn_metadata)
        if recorded is None:
            return super().build_per_group_and_layer_attn_metadata(common_attn_metadata, draft_index)
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        self._starts[: requests + 1].copy_(common.query_start_loc)
        self._lengths[:requests].copy_(common.seq_lens)
        if requests < recorded.requests:  # the others have no tokens
            self._starts[requests + 1 : recorded.requests + 1].fill_(common.num_actual_tokens)
            self._lengths[requests : recorded.requests].zero_()
        return recorded.by_group, recorded.by_layer

    def _can_be_recorded(self) -> bool:
        parallel = self.vllm_config.parallel_config
        builders = [group.get_metadata_builder() for group in self.draft_attn_groups]
        return (
            not self.speculative_config.enforce_eager
            and self.compilation_config.mode == CompilationMode.NONE
            and parallel.data_parallel_size == 1
            and parallel.decode_context_parallel_size == 1
            and all(group.kernel_block_size is None for group in self.draft_attn_groups)
            and all(type(builder) is NPUMetadataBuilder for builder in builders)
            and all(
                builder.get_cudagraph_support(self.vllm_config, builder.kv_cache_spec) == AttentionCGSupport.ALWAYS
                for builder in builders
            )
        )

    def _record(self, num_tokens: int) -> None:
        mode, tokens, _ = self._determine_batch_execution_and_padding(num_tokens)
        if mode == CUDAGraphMode.NONE or tokens in self.model.recorded:
            return
        self._starts.zero_()
        self._lengths.zero_()
        self._slot_mapping_buffer[:tokens].fill_(PADDING_SLOT_ID)
        common = self._common_metadata(tokens)
        by_group, by_layer = super().build_per_group_and_layer_attn_metadata(common)
        recorded = _Recorded(by_group, by_layer, common.num_reqs)
        self.model.recorded[tokens] = recorded
        inputs, _ = self.build_model_inputs_first_pass(tokens, tokens, None)
        with set_forward_context(
            recorded.by_layer,
            self.vllm_config,
            num_tokens=tokens,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(tokens),
        ):
            self.model(**inputs)

    def _common_metadata(self, tokens: int) -> CommonAttentionMetadata:
        """Return metadata of a batch of so many tokens, of any requests, in memory that stays."""
        requests = min(tokens, self.max_batch_size)
        return CommonAttentionMetadata(
            query_start_loc=self._starts[: requests + 1],
            query_start_loc_cpu=torch.zeros(requests + 1, dtype=torch.int32),
            seq_lens=self._lengths[:requests],
            num_reqs=requests,
            num_actual_tokens=tokens,
            max_query_len=tokens,
            max_seq_len=self.max_model_len,
            block_table_tensor=self._blocks()[:requests],
            slot_mapping=self._slot_mapping_buffer[:tokens],
        )

    def _recorded_for(self, common: CommonAttentionMetadata) -> _Recorded | None:
        if (
            not isinstance(self.model, _DraftGraphs)
            or common.block_table_tensor.data_ptr() != self._blocks().data_ptr()
        ):
            return None
        mode, tokens, _ = self._determine_batch_execution_and_padding(common.num_actual_tokens)
        return None if mode == CUDAGraphMode.NONE else self.model.recorded.get(tokens)

    def _blocks(self) -> torch.Tensor:
        """Return the runner's table of blocks, int32 [requests, blocks], which it keeps in one place."""
        table: torch.Tensor = self._runner.input_batch.block_table[self.kv_cache_gid].block_table.gpu
        return table


class NPUEagleProposer(_Graphed, EagleProposer):
    """vLLM's proposer of EAGLE, EAGLE-3 and MTP heads."""


class NPUDraftModelProposer(_Graphed, DraftModelProposer):
    """vLLM's proposer that drafts by a smaller model."""
