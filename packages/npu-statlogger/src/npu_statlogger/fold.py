"""How vLLM's per-step records become counters and distributions.

vLLM declares these records unstable, so each field is read by name with a default: a field that a later vLLM renames
goes missing from the lines and does not stop a server. tests/test_fold.py builds vLLM's own records and fails first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Batch", "fold_iteration", "fold_mm_cache", "fold_scheduler"]

_FINISHED_TIMES = {
    "e2e_seconds": "e2e_latency",
    "queue_seconds": "queued_time",
    "prefill_seconds": "prefill_time",
    "decode_seconds": "decode_time",
    "prompt_tokens": "num_prompt_tokens",
    "generation_tokens": "num_generation_tokens",
}
"""Distribution over finished requests -> field of vLLM's FinishedRequestStats."""

_LOAD = {
    "running": "num_running_reqs",
    "waiting_deferred": "num_skipped_waiting_reqs",
    "kv_cache_usage": "kv_cache_usage",
}
"""Distribution over scheduler steps -> field of vLLM's SchedulerStats."""

_WAITING = ("num_waiting_reqs", "num_skipped_waiting_reqs")


@dataclass
class Batch:
    """Counts and raw values of some steps, so that a distribution takes in many values at once."""

    counters: Counter[str] = field(default_factory=Counter)
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def fold_scheduler(batch: Batch, stats: Any) -> None:
    """Add one vllm.v1.metrics.stats.SchedulerStats: load per step, cache hits, speculative decoding."""
    batch.counters["scheduler_records"] += 1
    for name, attribute in _LOAD.items():
        _add(batch, name, [getattr(stats, attribute, None)])
    waiting, deferred = (getattr(stats, attribute, None) for attribute in _WAITING)
    # As vLLM's own log and metrics count them; the deferred ones wait, for instance, for a KV connector's load.
    _add(batch, "waiting", [None if waiting is None else waiting + (deferred or 0)])
    _fold_cache(batch, "prefix_cache", getattr(stats, "prefix_cache_stats", None))
    _fold_cache(batch, "external_prefix_cache", getattr(stats, "connector_prefix_cache_stats", None))
    drafts = getattr(stats, "spec_decoding_stats", None)
    if drafts is not None:
        _count(batch, "spec_decode.draft_tokens", getattr(drafts, "num_draft_tokens", 0))
        _count(batch, "spec_decode.accepted_tokens", getattr(drafts, "num_accepted_tokens", 0))


def fold_iteration(batch: Batch, stats: Any) -> None:
    """Add one vllm.v1.metrics.stats.IterationStats: latencies, tokens, preemptions, finished requests."""
    prompt = getattr(stats, "prompt_token_stats", None)
    _count(batch, "tokens.generation", getattr(stats, "num_generation_tokens", 0))
    _count(batch, "tokens.prompt", getattr(prompt, "total", 0))
    _count(batch, "tokens.prompt_computed", getattr(prompt, "computed", 0))
    _count(batch, "tokens.prompt_local_cache", getattr(prompt, "local_cache_hit", 0))
    _count(batch, "tokens.prompt_external_cache", getattr(prompt, "external_kv_transfer", 0))
    _count(batch, "preemptions", getattr(stats, "num_preempted_reqs", 0))
    _count(batch, "corrupted", getattr(stats, "num_corrupted_reqs", 0))
    _add(batch, "ttft_seconds", getattr(stats, "time_to_first_tokens_iter", ()))
    _add(batch, "inter_token_seconds", getattr(stats, "inter_token_latencies_iter", ()))
    _fold_finished(batch, getattr(stats, "finished_requests", ()))


def fold_mm_cache(batch: Batch, stats: Any) -> None:
    """Add one vllm.v1.metrics.stats.MultiModalCacheStats."""
    _fold_cache(batch, "mm_cache", stats)


def _fold_finished(batch: Batch, requests: Any) -> None:
    for request in requests:
        # str() of vLLM's FinishReason is what the API answers: stop, length, abort, error, repetition.
        _count(batch, f"finished.{getattr(request, 'finish_reason', 'unknown')}", 1)
    for name, attribute in _FINISHED_TIMES.items():
        _add(batch, name, [getattr(request, attribute, None) for request in requests])
    # vLLM reports 0 for a request of one token, which has no time per output token.
    per_token = [getattr(request, "mean_time_per_output_token", None) for request in requests]
    _add(batch, "time_per_output_token_seconds", [value for value in per_token if value])


def _fold_cache(batch: Batch, name: str, stats: Any) -> None:
    if stats is not None:
        _count(batch, f"{name}.queries", getattr(stats, "queries", 0))
        _count(batch, f"{name}.hits", getattr(stats, "hits", 0))


def _count(batch: Batch, name: str, amount: int) -> None:
    if amount:
        batch.counters[name] += amount


def _add(batch: Batch, name: str, values: Any) -> None:
    known = [value for value in values if value is not None]
    if known:
        batch.values[name] += known
