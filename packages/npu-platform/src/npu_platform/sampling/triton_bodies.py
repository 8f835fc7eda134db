"""The Triton kernels that vLLM's V1 runner launches, as plain torch functions, in one table.

vLLM's dispatcher (``vllm.triton_utils.dispatcher``) calls a body with the kernel's arguments in the kernel's order
and drops the launch grid. Nothing here reads a value back to the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from npu_platform.sampling import draft_bodies

_REJECTION = "vllm.v1.sample.rejection_sampler."
_DRAFTS = "vllm.v1.spec_decode.utils."


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    kv_cache_block_size: int,
    total_cp_world_size: int,
    total_cp_rank: int,
    cp_kv_cache_interleave_size: int,
    pad_id: int,
    block_size: int,
) -> None:
    """Fill slot_mapping int64 [max_num_tokens]: each token's block * block size + offset, then `pad_id`.

    query_start_loc int32 [requests + 1]; positions int64 [tokens]; block_table int32 [requests, blocks]. Ranks of a
    context-parallel group hold runs of `cp_kv_cache_interleave_size` tokens in turn; another rank's get `pad_id`.
    """
    tokens = torch.arange(num_tokens, device=positions.device, dtype=torch.int32)
    requests = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    position, ranks, run = positions[:num_tokens], total_cp_world_size, cp_kv_cache_interleave_size
    blocks = block_table.view(-1)[requests * block_table_stride + position // (kv_cache_block_size * ranks)]
    if ranks == 1:
        slots = blocks.long() * kv_cache_block_size + position % kv_cache_block_size
    else:
        offset = position % (kv_cache_block_size * ranks)
        slots = blocks.long() * kv_cache_block_size + offset // (ranks * run) * run + offset % run
        slots = torch.where(offset // run % ranks == total_cp_rank, slots, pad_id)
    slot_mapping[:num_tokens] = slots
    slot_mapping[num_tokens:max_num_tokens] = pad_id


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    max_num_tokens: int,
) -> None:
    """Repeat values [batch] by each request's token count into output [tokens]."""
    replaced = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    output.copy_(replaced[_request_of_token(cu_num_tokens, output.shape[0])])


def rejection_greedy_sample(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform: torch.Tensor | None,
    synthetic_rates: torch.Tensor | None,
    synthetic_mode: bool,
) -> None:
    """Accept each greedy request's drafts up to the first that differs from the target's argmax.

    output [batch, max_spec_len + 1]; the token at the first difference is the target's own, and a request whose
    drafts are all accepted gets its bonus token. In synthetic mode chance decides, by `synthetic_rates` [drafts].
    """
    if synthetic_mode:
        assert uniform is not None
        assert synthetic_rates is not None
        accepted = _accepted_by_chance(cu_num_draft_tokens, draft, uniform, synthetic_rates)
    else:
        accepted = draft == target_argmax
    rows = slice(None) if is_greedy is None else is_greedy
    _write_accepted(output, cu_num_draft_tokens, accepted, draft, target_argmax, bonus, rows)


def rejection_random_sample(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus: torch.Tensor,
    recovered: torch.Tensor,
    uniform: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_rates: torch.Tensor | None,
    no_draft_probs: bool,
    synthetic_mode: bool,
) -> None:
    """Accept a draft with probability target / draft (Leviathan et al. 2023), else take the recovered token.

    In synthetic mode drafts are accepted with the probabilities of `synthetic_rates` [drafts].
    """
    if synthetic_mode:
        assert synthetic_rates is not None
        accepted = _accepted_by_chance(cu_num_draft_tokens, draft, uniform, synthetic_rates)
    else:
        index = draft.long().clamp_min(0)[:, None]
        target = target_probs.gather(1, index)[:, 0]
        proposal = torch.ones_like(target) if draft_probs is None else draft_probs.gather(1, index)[:, 0]
        accepted = (draft >= 0) & (proposal > 0) & (target / proposal >= uniform)
    _write_accepted(output, cu_num_draft_tokens, accepted, draft, recovered, bonus, ~is_greedy)


def sample_recovered_tokens(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    vocab_size: int,
    block_size: int,
    no_draft_probs: bool,
    use_fp64_gumbel: bool,
) -> None:
    """Draw for each draft the token that replaces it when it is rejected, from max(target - draft, 0).

    output and draft may have any shape: the kernel reads and writes one token after the other.
    """
    output, draft = output.view(-1), draft.reshape(-1)
    if hasattr(torch.ops.npu_ops, "recovered_tokens") and inv_q.dtype == torch.float32:
        torch.ops.npu_ops.recovered_tokens(output, cu_num_draft_tokens, draft, draft_probs, target_probs, inv_q)
        return
    if draft_probs is None:
        residual = target_probs.scatter(1, draft.long().clamp_min(0)[:, None], 0.0)
    else:
        residual = (target_probs - draft_probs).clamp_min(0)
    noise = inv_q[_request_of_token(cu_num_draft_tokens, draft.shape[0])]
    output.copy_((residual * noise).argmax(dim=-1))


TRITON_BODIES: dict[str, Callable[..., None]] = {
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping,
    _REJECTION + "expand_kernel": expand,
    _REJECTION + "rejection_greedy_sample_kernel": rejection_greedy_sample,
    _REJECTION + "rejection_random_sample_kernel": rejection_random_sample,
    _REJECTION + "sample_recovered_tokens_kernel": sample_recovered_tokens,
    _DRAFTS + "eagle_step_slot_mapping_metadata_kernel": draft_bodies.step_slot_mapping,
    _DRAFTS + "eagle_prepare_inputs_padded_kernel": draft_bodies.tokens_to_sample,
    _DRAFTS + "eagle_prepare_next_token_padded_kernel": draft_bodies.next_tokens,
    _DRAFTS + "copy_and_expand_eagle_inputs_kernel": draft_bodies.expand_inputs,
}
"""Kernel's qualified name in vLLM -> body; an engine of the V2 runner gets none of them."""


def _request_of_token(cu_num_tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return int64 [num_tokens]: the request that each token belongs to."""
    tokens = torch.arange(num_tokens, device=cu_num_tokens.device, dtype=cu_num_tokens.dtype)
    return torch.searchsorted(cu_num_tokens, tokens, right=True)


def _write_accepted(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    accepted: torch.Tensor,
    if_accepted: torch.Tensor,
    if_rejected: torch.Tensor,
    bonus: torch.Tensor,
    rows: slice | torch.Tensor,
) -> None:
    """Write each request's tokens up to its first rejection, and its bonus token when there is none."""
    batch, width = output.shape
    starts = torch.nn.functional.pad(cu_num_draft_tokens, (1, 0))[:-1].long()
    counts = cu_num_draft_tokens.long() - starts
    steps = torch.arange(width, device=output.device)[None, :]
    token = (starts[:, None] + steps).clamp_max(max(accepted.shape[0] - 1, 0))
    is_draft = steps < counts[:, None]
    rejected = is_draft & ~accepted[token] if accepted.shape[0] else torch.zeros_like(is_draft)
    rejected_before = (rejected.long().cumsum(1) - rejected.long()) > 0
    values = bonus.view(batch, 1).expand(batch, width).to(output.dtype)
    if accepted.shape[0]:
        drafted = torch.where(accepted, if_accepted.to(output.dtype), if_rejected.to(output.dtype))[token]
        values = torch.where(is_draft, drafted, values)
    written = ~rejected_before & (steps <= counts[:, None])
    selected = torch.zeros(batch, 1, dtype=torch.bool, device=output.device)
    selected[rows] = True
    output.copy_(torch.where(written & selected, values, output))


def _accepted_by_chance(
    cu_num_draft_tokens: torch.Tensor, draft: torch.Tensor, uniform: torch.Tensor, rates: torch.Tensor
) -> torch.Tensor:
    """Return bool [tokens]: whether a draft's number is below the rate of its place; a padded draft, -1, never is."""
    request = _request_of_token(cu_num_draft_tokens, draft.shape[0])
    starts = torch.nn.functional.pad(cu_num_draft_tokens, (1, 0))
    place = torch.arange(draft.shape[0], device=draft.device) - starts[request]
    return (draft >= 0) & (uniform < rates[place])
