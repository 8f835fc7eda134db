"""The Triton kernels with which vLLM's V1 proposers lay out the inputs of a draft model, as plain torch functions.

A drafted batch is padded: the rejected tokens of a request stay in it, so that no count has to come to the host.
Nothing here reads a value back to the host.
"""

from __future__ import annotations

import torch


def step_slot_mapping(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    block_size: int,
    max_model_len: int,
    blocks_per_request: int,
    pad_id: int,
    batch_size: int,
) -> None:
    """Move each request on by the token that has just been drafted; beyond `max_model_len` it writes nowhere.

    positions int64 [batch], which may be out_positions; block_table int32 [batch, blocks]; seq_lens int32 [batch],
    changed in place; out_slot_mapping int64 [batch or more], `pad_id` after the batch.
    """
    following = positions + 1
    beyond = following >= max_model_len
    position = following.masked_fill(beyond, 0)
    block = (position // block_size).clamp_max(blocks_per_request - 1)
    slots = block_table[:batch_size].gather(1, block[:, None])[:, 0].long() * block_size + position % block_size
    out_slot_mapping[:batch_size] = slots.masked_fill(beyond, pad_id)
    out_slot_mapping[batch_size:] = pad_id
    out_positions.copy_(position)
    seq_lens.copy_((seq_lens + 1).masked_fill(beyond, 1).clamp_max(max_model_len))


def tokens_to_sample(
    cu_num_draft_tokens: torch.Tensor,
    valid_counts: torch.Tensor,
    query_start_loc: torch.Tensor,
    out_indices: torch.Tensor,
    out_rejected: torch.Tensor,
    num_reqs: int,
) -> None:
    """Find for each request its last accepted token in the batch, and how many after it were rejected.

    cu_num_draft_tokens, valid_counts (of sampled tokens), both outputs: int32 [requests]; query_start_loc int32
    [requests + 1].
    """
    drafts = torch.nn.functional.pad(cu_num_draft_tokens, (1, 0)).diff()
    rejected = (drafts + 1 - valid_counts).masked_fill(drafts == 0, 0)
    out_rejected.copy_(rejected)
    out_indices.copy_(query_start_loc[1 : num_reqs + 1] - 1 - rejected)


def next_tokens(
    sampled: torch.Tensor,
    discarded: torch.Tensor,
    backup: torch.Tensor,
    out_tokens: torch.Tensor,
    out_counts: torch.Tensor,
    vocab_size: int,
    sampled_per_request: int,
    num_reqs: int,
    stride: int,
    block_size: int,
) -> None:
    """Find each request's last sampled token and the number of them; a discarded request has none and takes its backup.

    sampled int32 [requests, drafts + 1], -1 after a rejection; discarded bool, backup int32 [requests or more];
    outputs int32 [requests].
    """
    valid = (sampled != -1) & (sampled < vocab_size) & ~discarded[:num_reqs, None]
    numbers = torch.arange(sampled_per_request, device=sampled.device)
    last = numbers.masked_fill(~valid, 0).amax(1)
    counts = valid.sum(1)
    token = sampled.gather(1, last[:, None])[:, 0]
    out_tokens.copy_(torch.where(counts > 0, token, backup[:num_reqs]))
    out_counts.copy_(counts)


def expand_inputs(
    target_tokens: torch.Tensor,
    target_positions: torch.Tensor,
    next_token: torch.Tensor,
    out_tokens: torch.Tensor,
    out_positions: torch.Tensor,
    out_is_rejected: torch.Tensor,
    out_is_masked: torch.Tensor,
    out_new_indices: torch.Tensor,
    out_hidden_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token: int,
    masked_token: int,
    total_input_tokens: int,
    new_slots: int,
    shift: bool,
    block_size: int,
) -> None:
    """Copy each request's accepted tokens, then its next token, masked tokens for parallel drafting, and padding.

    target_tokens [tokens], target_positions int64 [tokens]; next_token, query_end_loc (the last accepted token)
    [requests]; query_start_loc [requests + 1]. The outputs of tokens have room for [tokens + requests * new slots];
    out_new_indices int32 [requests * new slots]; out_hidden_mapping int32 [tokens], of use where the tokens are
    shifted by one, as EAGLE's are.
    """
    starts, requests = query_start_loc[:-1], query_end_loc.shape[0]
    longer = new_slots - int(shift)
    row = torch.arange(requests, device=starts.device)
    out_starts = starts + row * longer
    out = torch.arange(total_input_tokens + requests * longer, device=starts.device)
    request = torch.searchsorted(query_start_loc[1:] + (row + 1) * longer, out, right=True)
    step = out - out_starts[request]
    accepted = query_end_loc - starts + int(not shift)
    after = step - accepted[request]
    source = (starts[request] + int(shift) + step).clamp_max(total_input_tokens - 1)
    token = torch.where(after == 0, next_token[request], target_tokens[source])
    is_masked, is_rejected = (after > 0) & (after < new_slots), after >= new_slots
    where = slice(out.shape[0])
    out_tokens[where] = token.masked_fill(is_masked, masked_token).masked_fill(is_rejected, padding_token)
    out_positions[where] = (target_positions[starts.long()][request] + step).masked_fill(is_rejected, 0)
    out_is_rejected[where], out_is_masked[where] = is_rejected, is_masked
    first = (out_starts + accepted)[:, None]
    out_new_indices.copy_((first + torch.arange(new_slots, device=starts.device)).flatten())
    if shift:
        tokens = torch.arange(total_input_tokens, device=starts.device)
        out_hidden_mapping.copy_(tokens + torch.searchsorted(query_start_loc[1:], tokens, right=True) * longer)
