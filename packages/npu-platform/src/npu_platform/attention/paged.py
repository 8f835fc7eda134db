"""NPUPagedAttention: one attention layer over the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from npu_platform.attention import context_parallel, kernels
from npu_platform.attention.backend import NPUAttentionMetadata
from npu_platform.attention.quantized import QUANTIZED_CACHES, split_codes
from npu_platform.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_platform.attention.kept_prompts import TwoRuns
    from npu_platform.attention.media_prefixes import MediaPrefixes

ENCODERS = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


class NPUPagedAttention(AttentionImpl[NPUAttentionMetadata]):
    """Decoder, encoder and encoder-only attention; upstream interface: ``vllm.v1.attention.backend.AttentionImpl``.

    The KV cache of a layer is [blocks, kv heads, block size, 2 * head size]: a token's key, then its value.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        """Keep the layer's constants; raise UnsupportedFeatureError for an option without a kernel."""
        if extra:
            msg = f"npu attention has no {', '.join(sorted(extra))}: serve a model without it."
            raise UnsupportedFeatureError(msg)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.quantized = kv_cache_dtype in QUANTIZED_CACHES
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.causal = attn_type == AttentionType.DECODER
        self.window = -1 if sliding_window is None else sliding_window - 1
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        if self.dcp_world_size > 1:
            self._refuse_context_parallelism()
            self._join_ranks = context_parallel.joining(get_current_vllm_config())

    def npu_implementation(self) -> str:
        """Return the op, and the cache's format; see npu_platform.implementations."""
        if not kernels.native_attention(self.head_size):
            return "npu_platform: attention in torch ops"
        if self.attn_type in ENCODERS:
            return "npu_ops::varlen_attention"
        return f"npu_ops::paged_attention{'_quantized' if self.quantized else ''} (cache {self.kv_cache_dtype})"

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's key and value [tokens, kv heads, head size] into the cache; an encoder has none."""
        if self.attn_type in ENCODERS:
            return
        tokens = slot_mapping.shape[0]
        if self.quantized:
            caches = split_codes(kv_cache, self.kv_cache_dtype, self.head_size, layer)
            kernels.write_quantized_cache(key[:tokens], value[:tokens], *caches, slot_mapping)
        else:
            kernels.write_cache(key[:tokens], value[:tokens], *self._split(kv_cache), slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: NPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of query [tokens, heads, head size] into `output` and return it."""
        if output_scale is not None or output_block_scale is not None:
            msg = "npu attention does not quantise its output: switch the fusion pass fuse_attn_quant off."
            raise UnsupportedFeatureError(msg)
        if attn_metadata is None:  # the memory profile run
            return output.zero_()
        query = query.view(-1, self.num_heads, self.head_size)
        rows = output.view(-1, self.num_heads, self.head_size)
        if self.attn_type in ENCODERS:
            self._attend_to_batch(rows, query, key, value, attn_metadata)
        elif attn_metadata.context_lens is not None:
            self._attend_to_shards(layer, rows, query, key, value, kv_cache, attn_metadata)
        else:
            self._attend_to_cache(layer, rows, query, kv_cache, attn_metadata)
        return output

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Move the slopes to the layer's device once the weights are there."""
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to("npu")

    def _attend_to_cache(
        self,
        layer: torch.nn.Module,
        rows: torch.Tensor,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: NPUAttentionMetadata,
    ) -> None:
        attend, caches = self._over(kv_cache, layer)
        causal = self.causal and metadata.causal
        right = -1 if causal else self.window
        runs = metadata.two_runs if causal else None
        if runs is None or runs.rows is not None:
            self._attend(attend, rows, query, caches, metadata, causal=causal, right=right)
        if runs is not None:
            self._attend_to_runs(attend, rows, query, caches, runs)
        images = metadata.mm_prefix_range
        if causal and images is not None:
            seeing = query[images.rows]
            seen = torch.empty_like(seeing)
            self._attend(attend, seen, seeing, caches, images, causal=False, right=-1)
            rows.index_copy_(0, images.rows, seen)

    def _attend_to_runs(
        self,
        attend: Callable[..., None],
        rows: torch.Tensor,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        runs: TwoRuns,
    ) -> None:
        """Attend to a prompt and to a window of its answer; see :mod:`npu_platform.attention.kept_prompts`."""
        seeing = query if runs.rows is None else query[runs.rows]
        parts = []
        for lengths, causal, left in ((runs.first, False, -1), (runs.second, True, runs.window - 1)):
            found = torch.zeros_like(seeing), seeing.new_full(seeing.shape[:2], -torch.inf, dtype=torch.float32)
            where = runs.block_table, runs.query_start_loc, lengths
            attend(found[0], seeing, *caches, *where, self.scale, causal, left, -1, self.soft_cap, None, None, found[1])
            parts.append(found)
        seen = context_parallel.join(*parts).to(rows.dtype)
        if runs.rows is None:
            rows.copy_(seen)
        else:
            rows.index_copy_(0, runs.rows, seen)

    def _attend_to_shards(
        self,
        layer: torch.nn.Module,
        rows: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: NPUAttentionMetadata,
    ) -> None:
        """Attend to a cache that the ranks of a context-parallel group share out, and to this step's own tokens."""
        attend, caches = self._over(kv_cache, layer)
        everyone = context_parallel.gather_heads(query)
        seen = torch.zeros_like(everyone), everyone.new_full(everyone.shape[:2], -torch.inf, dtype=torch.float32)
        where = metadata.block_table, metadata.query_start_loc, metadata.context_lens
        options = -1, -1, self.soft_cap, None
        attend(seen[0], everyone, *caches, *where, self.scale, False, *options, None, seen[1])
        new = torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        kv = (each.view(-1, self.num_kv_heads, self.head_size) for each in (key, value))
        starts, causal = metadata.query_start_loc, metadata.causal
        kernels.varlen_attention(new[0], query, *kv, starts, self.scale, causal, *options, self.sinks, new[1])
        rows.copy_(context_parallel.join(self._join_ranks(seen), new))

    def _over(
        self, kv_cache: torch.Tensor, layer: torch.nn.Module
    ) -> tuple[Callable[..., None], tuple[torch.Tensor, ...]]:
        """Return the kernel for this cache, and what of the cache it takes."""
        if self.quantized:
            codes = split_codes(kv_cache, self.kv_cache_dtype, self.head_size, layer)
            return kernels.paged_attention_quantized, codes
        return kernels.paged_attention, self._split(kv_cache)

    def _refuse_context_parallelism(self) -> None:
        asked = {
            "a sliding window": self.window >= 0,
            "ALiBi": self.alibi_slopes is not None,
            "a cache of another layer": self.kv_sharing_target_layer_name is not None,
            f"attention of the kind {self.attn_type}": self.attn_type != AttentionType.DECODER,
        }
        if found := [what for what, there in asked.items() if there]:
            msg = (
                f"a layer with {' and '.join(found)} needs all keys of a request on each rank: "
                "leave out --decode-context-parallel-size."
            )
            raise UnsupportedFeatureError(msg)

    def _attend(
        self,
        attend: Callable[..., None],
        rows: torch.Tensor,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        requests: NPUAttentionMetadata | MediaPrefixes,
        *,
        causal: bool,
        right: int,
    ) -> None:
        attend(
            rows,
            query,
            *caches,
            requests.block_table,
            requests.query_start_loc,
            requests.seq_lens,
            self.scale,
            causal,
            self.window,
            right,
            self.soft_cap,
            self.alibi_slopes,
            self.sinks,
        )

    def _attend_to_batch(
        self,
        rows: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: NPUAttentionMetadata,
    ) -> None:
        kernels.varlen_attention(
            rows,
            query,
            key.view(-1, self.num_kv_heads, self.head_size),
            value.view(-1, self.num_kv_heads, self.head_size),
            metadata.query_start_loc,
            self.scale,
            False,
            self.window,
            self.window,
            self.soft_cap,
            self.alibi_slopes,
            self.sinks,
        )

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]
