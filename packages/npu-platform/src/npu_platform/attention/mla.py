"""NPUMLABackend: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a cache of latents.

A token's cache entry is its latent (kv_lora_rank) and its rotary key, one for all heads. Decode absorbs the up
projections into query and output, and attends to the latents themselves: they are the values, and with the rotary part
the keys, of one KV head; a few tokens of a request, such as drafts or a short turn, do the same. Prefill attends to
keys and values of each head, projected up from the latents of a request, as long as these fit into the memory that
vLLM's profile keeps for them; for longer contexts it does as decode. Ranks that share the cache out (decode context
parallelism) attend as decode does, too, each to the latents that it holds, for the heads of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import vllm.envs as vllm_envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionLayer, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from npu_platform.attention import context_parallel, kernels
from npu_platform.attention.quantized import QUANTIZED_CACHES
from npu_platform.attention.registration import MLA_BACKEND_NAME
from npu_platform.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    from npu_platform.attention.context_parallel import Part, Where

FEW_TOKENS = 128
"""So many new tokens of a request attend to the latents: keys and values of each head of its whole context would have
to be projected for them, which costs a head as much as attending to the latents with about 170 queries."""
_QUANTIZED = ("fp8", "fp8_e4m3")  # scales by token would have to lie in the latents' page


class NPUMLABackend(MLACommonBackend):
    """Latent attention; upstream interface: ``MLACommonBackend``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", *_QUANTIZED]  # type: ignore[assignment]

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's backend registry."""
        return MLA_BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[NPUMLAAttention]:
        """Return the implementation of one layer."""
        return NPUMLAAttention

    @staticmethod
    def get_builder_cls() -> type[NPUMLAMetadataBuilder]:
        """Return the builder of a step's metadata."""
        return BatchInvariantMetadataBuilder if vllm_envs.VLLM_BATCH_INVARIANT else NPUMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Return that any block size will do: the kernels divide by it at run time."""
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return that any size of a latent will do."""
        return []

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return whether npu-ops' kernels, which have the mode, serve."""
        return kernels.has_native_ops()


@dataclass
class NPUMLADecodeMetadata(MLACommonDecodeMetadata):
    """Which latents each decode sees; where ranks share them out, a decode is one token."""

    starts: torch.Tensor
    """int32 [decodes + 1]: first token of each in the batch."""


class NPUMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's builder; few new tokens of a request, such as drafts, count as decode, and all steps that are recorded."""

    query_len_support = QueryLenSupport.VARLEN

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Build vLLM's builder, and show each layer's implementation the layer, which has the absorbed weights."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)
        # A step of a graph has no more tokens, so it consists of decodes, which read on the device what changes.
        recorded = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.reorder_batch_threshold = max(FEW_TOKENS, recorded, self.reorder_batch_threshold)
        # Contexts are planned as one chunk, since nothing copies them into a workspace.
        step = self.page_size * self.dcp_world_size
        longest = -(-vllm_config.model_config.max_model_len // step) * step
        self.chunked_prefill_workspace_size = vllm_config.scheduler_config.max_num_seqs * longest
        self._alone = context_parallel.TokensAlone(vllm_config, device) if self.dcp_world_size > 1 else None
        for name in layer_names:
            layer = vllm_config.compilation_config.static_forward_context[name]
            layer.impl.belongs_to(layer, self._alone, context_parallel.joining(vllm_config))

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        """Return 0 rows: no kernel here reads vLLM's workspace for chunks of a context, which may not be so small."""
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        return ranks if ranks > 1 else 0

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> NPUMLADecodeMetadata:
        table, starts, lengths = block_table_tensor, query_start_loc_device, seq_lens_device
        if self._alone is not None:
            assert dcp_tot_seq_lens_device is not None
            table, starts, lengths = self._alone.of((table, starts, dcp_tot_seq_lens_device), num_decode_tokens)
        return NPUMLADecodeMetadata(table, lengths, dcp_tot_seq_lens_device, starts)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Return that any step of few tokens can be recorded where the native kernels serve."""
        return AttentionCGSupport.ALWAYS if kernels.has_native_ops() else AttentionCGSupport.NEVER


class BatchInvariantMetadataBuilder(NPUMLAMetadataBuilder):
    """Lets all queries count as decode, so that prompts, too, attend to the latents.

    Or else a token's result would depend on where a chunk of its prompt ends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the builder; arguments are those of ``NPUMLAMetadataBuilder``."""
        super().__init__(*args, **kwargs)
        self.reorder_batch_threshold = self.vllm_config.scheduler_config.max_num_batched_tokens


class NPUMLAPrefill(MLAPrefillBackend):
    """Attention of whole prompts, keys and values by head; with a cached context NPUMLAAttention does it itself."""

    supported_dtypes: ClassVar[list[torch.dtype]] = NPUMLABackend.supported_dtypes

    @staticmethod
    def get_name() -> str:
        """Return the name for logs."""
        return MLA_BACKEND_NAME

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each request's q [tokens, heads, dim] to its own k and v; returns [tokens, heads, v dim]."""
        if return_softmax_lse or output_scale is not None:
            msg = "npu prefill gives no log-sum-exp and no quantised output: leave context parallelism and fusion off."
            raise UnsupportedFeatureError(msg)
        out = q.new_empty(*v.shape) if out is None else out
        starts = self._prefill_metadata.query_start_loc
        kernels.varlen_attention(out, q, k, v, starts, self.scale, True, -1, -1, 0.0, None, None)
        return out

    def run_prefill_context_chunk(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: no part of the platform splits a context by chunks."""
        msg = "npu attends to a request's context at once: leave context parallelism off."
        raise UnsupportedFeatureError(msg)


class NPUMLAAttention(MLACommonImpl[MLACommonMetadata]):
    """One layer of latent attention; upstream interface: ``MLACommonImpl``."""

    can_return_lse_for_decode = True
    supports_dcp = True
    layer: MLAAttention

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Keep the layer's constants; queries stay in the model's dtype whatever the cache's."""
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False
        self.quantized = self.kv_cache_dtype in _QUANTIZED
        self._alone: context_parallel.TokensAlone | None = None

    def belongs_to(
        self,
        layer: MLAAttention,
        alone: context_parallel.TokensAlone | None,
        join_ranks: Callable[[Part], Part] = context_parallel.join_ranks,
    ) -> None:
        """Keep the layer, which has the absorbed weights; `alone` is there where ranks share the cache out.

        They gather heads and join what they find here: to vLLM's layer, which would do it in kernels of Triton, this
        is then one rank that has found everything.
        """
        self.layer, self._alone, self._join_ranks = layer, alone, join_ranks
        self.dcp_world_size = 1

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latents [tokens, rank] and rotary keys [tokens, 1, dim] into the cache [blocks, block size, both].

        `skip_scale`, of vLLM 0.33, says that `k_scale` is 1; kernels divide by that, too.
        """
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        tokens = slots.shape[0]
        rows = kv_c_normed[:tokens].unsqueeze(1), k_pe[:tokens].view(tokens, 1, -1)
        pages = self._pages(kv_cache)
        caches = pages[..., : self.kv_lora_rank], pages[..., self.kv_lora_rank :]
        if self.quantized:
            kernels.write_quantized_cache(*rows, *caches, k_scale, k_scale, slots)
        else:
            kernels.write_cache(*rows, *caches, slots)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend absorbed queries [tokens, heads, rank + rotary dim] to the latents; returns [tokens, heads, rank]."""
        decode = attn_metadata.decode
        assert isinstance(decode, NPUMLADecodeMetadata)
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        where = decode.block_table, decode.starts, decode.seq_lens
        if self._alone is not None:
            return self._attend_across_ranks(query, kv_c_and_k_pe_cache, where, layer._k_scale), None
        return self._attend_to_pages(query, kv_c_and_k_pe_cache, where, layer._k_scale, attn_metadata.causal), None

    def forward_mha(  # type: ignore[override]
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Write into output [tokens, heads * v dim] the attention of prefill queries [tokens, heads, dim]."""
        prefill = attn_metadata.prefill
        assert prefill is not None
        if prefill.chunked_context is None:
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
            return
        assert prefill.query_lens_cpu is not None
        rows = output.view(-1, self.num_heads, self.v_head_dim)
        contexts, queries = prefill.chunked_context.context_lens_list, prefill.query_lens_cpu.tolist()
        most = max(map(sum, zip(contexts, queries, strict=True)))
        if self._alone is not None or most > self.most_rows_to_project():
            self._attend_absorbed(rows, q, kv_c_and_k_pe_cache, prefill, k_scale)
            return
        start = 0
        for request, (context, new) in enumerate(zip(contexts, queries, strict=True)):
            latents = self._gather(kv_c_and_k_pe_cache, prefill.block_table[request], context + new, k_scale)
            end = start + new
            self._attend_to_latents(rows[start:end], q[start:end], latents.to(q.dtype))
            start = end

    def most_rows_to_project(self) -> int:
        """Return how many tokens' keys and values of all heads fit where vLLM's profile kept room for projections."""
        reserved = (
            self.layer.chunked_prefill_workspace_size * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        )
        # gathered, and contiguous; of codes also themselves, their values and these times the scale, in float32
        latents = (6 if self.quantized else 2) * (self.kv_lora_rank + self.qk_rope_head_dim)
        projected = self.qk_nope_head_dim + self.v_head_dim + self.qk_head_dim
        return reserved // (latents + self.num_heads * projected)

    def _attend_absorbed(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        prefill: MLACommonPrefillMetadata,
        k_scale: torch.Tensor,
    ) -> None:
        """As forward_mqa does, for all requests of a prefill: nothing that is allocated grows with the context."""
        assert prefill.chunked_context is not None
        query = q.new_empty(q.shape[0], self.num_heads, self.kv_lora_rank + self.qk_rope_head_dim)
        q_nope, query[..., self.kv_lora_rank :] = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        absorbed = query[..., : self.kv_lora_rank].transpose(0, 1)
        torch.bmm(q_nope.transpose(0, 1), self.layer.W_UK_T, out=absorbed)
        starts = prefill.query_start_loc
        where = prefill.block_table, starts, prefill.chunked_context.context_lens + starts.diff()
        if self._alone is None:
            found = self._attend_to_pages(query, kv_cache, where, k_scale, causal=True)
        else:
            found = self._attend_across_ranks(query, kv_cache, self._alone.of(where, q.shape[0]), k_scale)
        self.layer._v_up_proj(found, out=out)

    def _attend_across_ranks(
        self, query: torch.Tensor, kv_cache: torch.Tensor, where: Where, scale: torch.Tensor
    ) -> torch.Tensor:
        """As _attend_to_pages, for tokens alone; each rank of the group has a part of the latents that they see.

        With ``--dcp-q-replicate`` a decode's query has the heads of all of them already.
        """
        mine = query.shape[1] == self.num_heads
        everyone = context_parallel.gather_heads(query) if mine else query
        sums = everyone.new_full(everyone.shape[:2], -torch.inf, dtype=torch.float32)
        seen = self._attend_to_pages(everyone, kv_cache, where, scale, causal=False, sums=sums)
        return self._join_ranks((seen, sums))[0].to(query.dtype)

    def _attend_to_pages(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        where: Where,
        scale: torch.Tensor,
        causal: bool,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend absorbed queries to latents: [tokens, heads, rank]; into `sums` go the logs of rows' sums."""
        out = query.new_zeros(*query.shape[:2], self.kv_lora_rank)
        pages = self._pages(kv_cache)
        latents = pages[..., : self.kv_lora_rank]
        arguments = (*where, self.scale, causal, -1, -1, 0.0, None, None, sums)
        if self.quantized:
            kernels.paged_attention_quantized(out, query, pages, latents, scale, scale, *arguments)
        else:
            kernels.paged_attention(out, query, pages, latents, *arguments)
        return out

    def _attend_to_latents(self, out: torch.Tensor, q: torch.Tensor, latents: torch.Tensor) -> None:
        """Attend one request's last queries to all its tokens, given by latents [tokens, rank + rotary dim]."""
        tokens = latents.shape[0]
        projected = self.kv_b_proj(latents[:, : self.kv_lora_rank].contiguous())[0]
        projected = projected.view(tokens, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = projected.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = self._concat_k_nope_k_pe(k_nope, latents[:, None, self.kv_lora_rank :])
        # one page that holds the whole request
        page = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        table, starts, length = (
            torch.tensor(values, dtype=torch.int32, device=q.device) for values in ([[0]], [0, q.shape[0]], [tokens])
        )
        kernels.paged_attention(out, q, *page, table, starts, length, self.scale, True, -1, -1, 0.0, None, None)

    def _gather(self, cache: torch.Tensor, blocks: torch.Tensor, length: int, scale: torch.Tensor) -> torch.Tensor:
        """Return a request's first cache entries [length, rank + rotary dim], dequantised."""
        indexable = cache.view(torch.uint8) if self.quantized else cache
        rows = indexable[blocks[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]
        return rows.view(QUANTIZED_CACHES[self.kv_cache_dtype]).float() * scale if self.quantized else rows

    def _pages(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """Return the cache as [blocks, one KV head, block size, rank + rotary dim]."""
        pages = kv_cache.unsqueeze(1)
        return pages.view(QUANTIZED_CACHES[self.kv_cache_dtype]) if self.quantized else pages
