"""How vLLM's per-step records become counters and distributions.

vLLM declares these records unstable, so each field is read by name with a default: a field that a later vLLM renames
goes missing from the lines and does not stop a server. tests/test_fold.py builds vLLM's own records and fails first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_statlogger.snapshot import Snapshot

__all__ = ["fold_iteration", "fold_mm_cache", "fold_scheduler"]

_FINISHED_TIMES = {
    "e2e_seconds": "e2e_latency",
    "queue_seconds": "queued_time",
    "prefill_seconds": "prefill_time",
    "decode_seconds": "decode_time",
    "prompt_tokens": "num_prompt_tokens",
    "generation_tokens": "num_generation_tokens",
}
"""Distribution over finished requests -> field of vLLM's FinishedRequestStats."""


def fold_scheduler(snapshot: Snapshot, stats: Any) -> None:
    """Add one vllm.v1.metrics.stats.SchedulerStats: load per step, cache hits, speculative decoding."""
    snapshot.counters["scheduler_records"] += 1
    for name, attribute in (
        ("running", "num_running_reqs"),
        ("waiting", "num_waiting_reqs"),
        ("kv_cache_usage", "kv_cache_usage"),
    ):
        _add(snapshot, name, [getattr(stats, attribute, None)])
    _fold_cache(snapshot, "prefix_cache", getattr(stats, "prefix_cache_stats", None))
    _fold_cache(snapshot, "external_prefix_cache", getattr(stats, "connector_prefix_cache_stats", None))
    drafts = getattr(stats, "spec_decoding_stats", None)
    if drafts is not None:
        _count(snapshot, "spec_decode.draft_tokens", getattr(drafts, "num_draft_tokens", 0))
        _count(snapshot, "spec_decode.accepted_tokens", getattr(drafts, "num_accepted_tokens", 0))


def fold_iteration(snapshot: Snapshot, stats: Any) -> None:
    """Add one vllm.v1.metrics.stats.IterationStats: latencies, tokens, preemptions, finished requests."""
    prompt = getattr(stats, "prompt_token_stats", None)
    _count(snapshot, "tokens.generation", getattr(stats, "num_generation_tokens", 0))
    _count(snapshot, "tokens.prompt", getattr(prompt, "total", 0))
    _count(snapshot, "tokens.prompt_computed", getattr(prompt, "computed", 0))
    _count(snapshot, "tokens.prompt_local_cache", getattr(prompt, "local_cache_hit", 0))
    _count(snapshot, "tokens.prompt_external_cache", getattr(prompt, "external_kv_transfer", 0))
    _count(snapshot, "preemptions", getattr(stats, "num_preempted_reqs", 0))
    _count(snapshot, "corrupted", getattr(stats, "num_corrupted_reqs", 0))
    _add(snapshot, "ttft_seconds", getattr(stats, "time_to_first_tokens_iter", ()))
    _add(snapshot, "inter_token_seconds", getattr(stats, "inter_token_latencies_iter", ()))
    _fold_finished(snapshot, getattr(stats, "finished_requests", ()))


def fold_mm_cache(snapshot: Snapshot, stats: Any) -> None:
    """Add one vllm.v1.metrics.stats.MultiModalCacheStats."""
    _fold_cache(snapshot, "mm_cache", stats)


def _fold_finished(snapshot: Snapshot, requests: Any) -> None:
    for request in requests:
        # str() of vLLM's FinishReason is what the API answers: stop, length, abort, error, repetition.
        _count(snapshot, f"finished.{getattr(request, 'finish_reason', 'unknown')}", 1)
    for name, attribute in _FINISHED_TIMES.items():
        _add(snapshot, name, [getattr(request, attribute, None) for request in requests])
    # vLLM reports 0 for a request of one token, which has no time per output token.
    per_token = [getattr(request, "mean_time_per_output_token", None) for request in requests]
    _add(snapshot, "time_per_output_token_seconds", [value for value in per_token if value])


def _fold_cache(snapshot: Snapshot, name: str, stats: Any) -> None:
    if stats is not None:
        _count(snapshot, f"{name}.queries", getattr(stats, "queries", 0))
        _count(snapshot, f"{name}.hits", getattr(stats, "hits", 0))


def _count(snapshot: Snapshot, name: str, amount: int) -> None:
    if amount:
        snapshot.counters[name] += amount


def _add(snapshot: Snapshot, name: str, values: Any) -> None:
    known = [value for value in values if value is not None]
    if known:
        snapshot.distributions[name].add(known)
