"""NPUPagedBackend: what the paged attention can do, and the metadata that it needs each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from npu_platform.attention import kernels
from npu_platform.attention.context_parallel import ContextLengths
from npu_platform.attention.kept_prompts import KeptPrompts, TwoRuns
from npu_platform.attention.media_prefixes import MediaPrefixes, media_prefixes
from npu_platform.attention.quantized import QUANTIZED_CACHES, with_token_scales
from npu_platform.attention.registration import BACKEND_NAME
from npu_platform.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    from npu_platform.attention.paged import NPUPagedAttention


class NPUPagedBackend(AttentionBackend):
    """Paged attention with separate cache writes; upstream interface: ``AttentionBackend``."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", *QUANTIZED_CACHES]

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's backend registry."""
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[NPUPagedAttention]:
        """Return the implementation of one layer."""
        from npu_platform.attention.paged import NPUPagedAttention

        return NPUPagedAttention

    @staticmethod
    def get_builder_cls() -> type[NPUMetadataBuilder]:
        """Return the builder of a step's metadata."""
        return NPUMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Return that any block size will do: the kernels divide by it at run time."""
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts in preference order: a block's heads together, tokens of one head contiguous."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Make room for the scales of a cache that has one for each token and head."""
        return with_token_scales(spec)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Say whether layers of `attn_type` run here."""
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER_ONLY,
            AttentionType.ENCODER,
            AttentionType.ENCODER_DECODER,
        )

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Say that scales of the KV cache by head run here."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Say that attention sinks run here."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Say that sliding windows run here."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Say that npu-ops' kernel has a mode for it; `features` refuses it without npu-ops."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Say that bidirectional attention over the cache runs here."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Say that the tokens of an image may see each other."""
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        """Say that an answer's tokens may see the prompt and a window."""
        return True


@dataclass
class NPUAttentionMetadata(AttentionMetadata):
    """One step's batch as the attention kernels read it; everything that changes by step is a device tensor."""

    query_start_loc: torch.Tensor
    """int32 [requests + 1]: first token of each request in the batch."""
    seq_lens: torch.Tensor
    """int32 [requests]: tokens of each request, those of this step included; 0 for padding."""
    block_table: torch.Tensor
    """int32 [requests, blocks]."""
    slot_mapping: torch.Tensor | None
    """int64 [tokens]: where this step's keys and values go; negative for padding, None for encoder-only layers."""
    num_actual_tokens: int
    """Tokens of the batch, padding excluded."""
    causal: bool = True
    mm_prefix_range: MediaPrefixes | None = None
    """The step's images whose tokens see each other; vLLM's Gemma 4 sets it to None, by this name, for some layers."""
    context_lens: torch.Tensor | None = None
    """int32 [requests]: tokens from before this step that this rank holds, where ranks share the cache out."""
    two_runs: TwoRuns | None = None
    """The step's tokens that may see two runs of keys, of a model with R-SWA."""


class NPUMetadataBuilder(AttentionMetadataBuilder[NPUAttentionMetadata]):
    """Builds :class:`NPUAttentionMetadata` from the runner's common metadata, without copies."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Keep what the base class keeps, and room for what a recorded step reads beside the runner's metadata."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        sharded = vllm_config.parallel_config.decode_context_parallel_size > 1
        self._context_lengths = ContextLengths(vllm_config, device) if sharded else None
        window = vllm_config.model_config.rswa_window if vllm_config.model_config is not None else None
        self._kept_prompts = None if window is None else KeptPrompts(vllm_config, device, window)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Return ALWAYS for the native kernels, which read every per-step value on the device, else NEVER.

        Where the tokens of an image see each other, the launches of a prompt depend on its images, and with R-SWA on
        the answers beside it: UNIFORM_BATCH.
        """
        # layers with caches of several precisions come as one spec that holds theirs
        specs = getattr(kv_cache_spec, "kv_cache_specs", {"": kv_cache_spec}).values()
        native = all(kernels.native_attention(getattr(spec, "head_size", 0)) for spec in specs)
        if not native:
            return AttentionCGSupport.NEVER
        model = vllm_config.model_config
        of_decodes = model is not None and (model.is_mm_prefix_lm or model.rswa_window is not None)
        return AttentionCGSupport.UNIFORM_BATCH if of_decodes else AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> NPUAttentionMetadata:
        """Return the metadata of one step; parameter names are part of vLLM's contract."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            msg = "attention that is causal for some requests of a batch only does not run on npu: serve another model."
            raise UnsupportedFeatureError(msg)
        return NPUAttentionMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
            causal=common.causal,
            mm_prefix_range=media_prefixes(common),
            context_lens=None if self._context_lengths is None else self._context_lengths.of(common),
            two_runs=None if self._kept_prompts is None else self._kept_prompts.of(common),
        )
