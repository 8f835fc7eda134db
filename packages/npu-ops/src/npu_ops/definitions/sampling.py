"""From logits to a token: penalties, the top-k, top-p and min-p masks, the greedy and the random choice, logprobs."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define


def _one_a_row(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@define("argmax(Tensor logits) -> Tensor", _one_a_row)
def argmax(logits: Tensor) -> Tensor:
    """Index of the first maximum of each row; a NaN counts as the highest. logits: [B, V]; returns int64 [B]."""
    width = logits.shape[-1]
    highest = logits.amax(dim=-1, keepdim=True)
    hit = (logits == highest) | (highest.isnan() & logits.isnan())
    return torch.where(hit, torch.arange(width, device=logits.device), width).amin(dim=-1)


@define("top_k_top_p(Tensor(a!) logits, Tensor? k, Tensor? p) -> ()")
def top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
    """Set what lies outside the k highest and outside the nucleus of mass p to -inf, in place.

    logits: float32 [B, V]; k: int32 or int64 [B], 0 or V: all; p: float32 [B] in (0, 1]. The top-k mask comes first.
    Logits equal to
    the k-th stay. The nucleus keeps the highest logit, and of equals at its edge the last ones (Holtzman et al. 2020,
    arXiv 1904.09751; ties as vLLM's stable ascending sort leaves them).
    """
    ordered, index = logits.sort(dim=-1, stable=True)
    width = logits.shape[-1]
    if k is not None:
        kept = torch.where((k <= 0) | (k > width), width, k.long())
        bound = ordered.gather(1, (width - kept)[:, None])
        ordered = ordered.masked_fill(ordered < bound, float("-inf"))
    if p is not None:
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        gone = (mass <= 1 - p[:, None]) & (p[:, None] < 1)
        gone[:, -1] = False
        ordered = ordered.masked_fill(gone, float("-inf"))
    logits.scatter_(-1, index, ordered)


@define("min_p(Tensor(a!) logits, Tensor min_p) -> ()")
def min_p(logits: Tensor, min_p: Tensor) -> None:
    """Set what is less probable than min_p times the most probable to -inf, in place (arXiv 2407.01082).

    logits: float32 [B, V]; min_p: float32 [B] in [0, 1], 0: all stay.
    """
    bound = logits.amax(dim=-1, keepdim=True) + min_p.view(-1, 1).log()
    logits.masked_fill_(logits < bound, float("-inf"))


@define("random_sample(Tensor logits, Tensor uniform) -> Tensor", lambda logits, uniform: _one_a_row(logits))
def random_sample(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token of softmax(logits) for each row by inverting its distribution function at a uniform number.

    logits: float32 [B, V]; uniform: float64 [B] in [0, 1); returns int64 [B]. A row and its number give the same token
    whatever shares the batch. A row of an infinite logit gives its first one; a row without a mass gives 0.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    shifted = torch.where((peak == float("inf")) & (logits == peak), 0.0, logits.double() - peak)
    mass = shifted.exp().nan_to_num(0.0).cumsum(dim=-1)
    index = torch.searchsorted(mass, uniform.view(-1, 1) * mass[:, -1:], right=True)[:, 0]
    index = torch.where(peak[:, 0] == float("inf"), (logits == float("inf")).int().argmax(dim=-1), index)
    return torch.where(mass[:, -1] > 0, index.clamp_max(logits.shape[-1] - 1), 0)


@define(
    "seeded_sample(Tensor logits, Tensor requests, Tensor temperature, Tensor seeds, Tensor positions) -> Tensor",
    lambda logits, requests, temperature, seeds, positions: _one_a_row(logits),
)
def seeded_sample(logits: Tensor, requests: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Choose a token of each row: at random, by its request's seed and its position, or the highest.

    logits: float32 [B, V], divided by their temperatures; requests: int64 [B], rows of temperature (float32 [R]) and
    seeds (int64 [R]); positions: int64 [B]. Returns int64 [B], drawn as by ``random_sample``; the highest is taken at
    temperature 0, and where requests is none of [0, R). The uniform number is a hash of seed and position, as vLLM's V2
    sampler makes it (``murmur3_uniform64`` of ``vllm/v1/worker/gpu/sample/gumbel.py``, at token 0).
    """
    known = (requests >= 0) & (requests < len(seeds))
    request = torch.where(known, requests, 0)
    greedy = ~known | (temperature[request] == 0)
    drawn = random_sample.reference(logits, _uniform(seeds[request], positions))
    return torch.where(greedy, argmax.reference(logits), drawn)


def _uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    bits = _murmur3(seeds, positions, 0x9E3779B9) << 21 | _murmur3(seeds, positions, 0) >> 11
    return ((bits.double() + 0.5) * 2.0**-53).clamp_max(1 - 2.0**-53)


def _murmur3(seeds: Tensor, positions: Tensor, domain: int) -> Tensor:
    """Hash the words of seed, position and a zero (MurmurHash3, 32 bits); products wrap, of which 32 bits stay."""
    low = 0xFFFFFFFF

    def rotated(x: Tensor, by: int) -> Tensor:
        return (x << by | x >> (32 - by)) & low

    h = torch.full_like(seeds, domain)
    for word in (seeds & low, seeds >> 32 & low, positions & low, torch.zeros_like(seeds)):
        h = h ^ rotated(word * 0xCC9E2D51 & low, 15) * 0x1B873593 & low
        h = rotated(h, 13) * 5 + 0xE6546B64 & low
    h = h ^ 16  # bytes of the four words
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & low
    return h ^ h >> 16


@define(
    "apply_penalties(Tensor(a!) logits, Tensor prompt, Tensor output, Tensor presence, Tensor frequency, "
    "Tensor repetition) -> ()"
)
def apply_penalties(
    logits: Tensor, prompt: Tensor, output: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    """Penalise the tokens that occurred, in place, as OpenAI's interface defines it and vLLM applies it.

    logits: float32 [B, V]; prompt, output: int64 [B, any], ids outside the vocabulary are padding; presence, frequency,
    repetition: float32 [B]. Repetition divides a positive logit, and multiplies another, of each token that either has;
    then frequency times its count in the output, and presence once for a token of the output, are subtracted.
    """
    width = logits.shape[-1]

    def counts(ids: Tensor) -> Tensor:
        index = torch.where((ids < 0) | (ids > width), width, ids)
        found = torch.zeros(logits.shape[0], width + 1, dtype=torch.int64, device=logits.device)
        return found.scatter_add_(1, index, torch.ones_like(index))[:, :width]

    times = counts(output)
    factor = torch.where(logits > 0, 1 / repetition.view(-1, 1), repetition.view(-1, 1))
    logits.mul_(torch.where((counts(prompt) > 0) | (times > 0), factor, 1.0))
    logits.sub_(frequency.view(-1, 1) * times)
    logits.sub_(presence.view(-1, 1) * (times > 0))


@define(
    "counted_penalties(Tensor(a!) logits, Tensor requests, Tensor tokens, Tensor drafts, Tensor presence, "
    "Tensor frequency, Tensor repetition, Tensor prompt, Tensor counts) -> ()"
)
def counted_penalties(
    logits: Tensor,
    requests: Tensor,
    tokens: Tensor,
    drafts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    prompt: Tensor,
    counts: Tensor,
) -> None:
    """Penalise as ``apply_penalties`` does, in place, by counts that are kept for the whole vocabulary.

    logits: float32 [B, V]; requests: int64 [B], rows of presence, frequency, repetition (float32 [R]), prompt (int32
    [R, V / 32], a bit for each token that it has, the lowest first) and counts (int32 [R, V] at least, times that a
    token was put out); a row whose request is none of [0, R) stays. tokens, drafts: int32 [B]: the tokens of so many
    rows, up to this one, are drafts of its request, which count as put out. Upstream: ``apply_penalties`` of
    ``vllm/v1/worker/gpu/sample/penalties.py``.
    """
    width, places = logits.shape[1], torch.arange(logits.shape[1], device=logits.device)
    known = (requests >= 0) & (requests < len(counts))
    request = torch.where(known, requests, 0)
    in_prompt = (prompt[request][:, places // 32] >> (places % 32) & 1) > 0
    times = counts[request][:, :width].long()
    age = torch.arange(len(tokens), device=logits.device)
    drafted = (age[:, None] >= age) & (age[:, None] - age < drafts[:, None])  # [row, row that it counts]
    times += drafted.long() @ (tokens[:, None] == places).long()
    factor = repetition[request, None]
    factor = torch.where(logits > 0, 1 / factor, factor)
    out = logits * torch.where(in_prompt | (times > 0), factor, 1.0)
    out -= frequency[request, None] * times
    out -= presence[request, None] * (times > 0)
    logits.copy_(torch.where(known[:, None], out, logits))


def _fake_top(logprobs: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (logprobs.shape[0], n + 1)
    return logprobs.new_empty(shape, dtype=torch.int32), logprobs.new_empty(shape), _one_a_row(logprobs)


@define("top_logprobs(Tensor logprobs, Tensor tokens, int n) -> (Tensor, Tensor, Tensor)", _fake_top)
def top_logprobs(logprobs: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Report each row's token and its n highest: int32 indices and float32 values [B, n + 1], int64 ranks [B].

    logprobs: float32 [B, V] without NaN; tokens: int64 [B]. The token comes first, then the highest in falling
    order, of equals the earlier ones; its rank counts the logprobs that are not below its own.
    """
    own = logprobs.gather(1, tokens.view(-1, 1))
    values, indices = logprobs.sort(dim=-1, descending=True, stable=True)
    indices = torch.cat((tokens.view(-1, 1), indices[:, :n]), dim=1).to(torch.int32)
    return indices, torch.cat((own, values[:, :n]), dim=1), (logprobs >= own).sum(dim=-1)


@define(
    "recovered_tokens(Tensor(a!) output, Tensor cu_num_draft_tokens, Tensor draft, Tensor? draft_probs, "
    "Tensor target_probs, Tensor noise) -> ()"
)
def recovered_tokens(
    output: Tensor,
    cu_num_draft_tokens: Tensor,
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    noise: Tensor,
) -> None:
    """Find for each drafted token the one that replaces it if rejected: the highest max(target - draft, 0) * noise.

    output, draft: int32 [T]; cu_num_draft_tokens: int32 [R], where each request's tokens end; draft_probs (None: the
    draft was certain), target_probs: float32 [T, V]; noise: float32 [R, V], one over exponentials (Leviathan et al.
    2023, arXiv 2211.17192).
    """
    if draft_probs is None:
        vocabulary = torch.arange(target_probs.shape[1], device=draft.device)
        rest = target_probs.masked_fill(vocabulary == draft[:, None], 0.0)
    else:
        rest = (target_probs - draft_probs).clamp_min(0)
    tokens = torch.arange(draft.shape[0], device=draft.device, dtype=cu_num_draft_tokens.dtype)
    request = torch.searchsorted(cu_num_draft_tokens, tokens, right=True)
    output.copy_((rest * noise[request]).argmax(dim=-1))
