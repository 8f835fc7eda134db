"""Names of the lines "npu-statlogger/1", which had names of their own, in the names of today's."""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["upgraded"]

_CACHES = ("prefix_cache", "external_prefix_cache", "mm_cache")
_COUNTERS = {
    "tokens.generation": "generation_tokens",
    "tokens.prompt": "prompt_tokens",
    "tokens.prompt_computed": "prompt_tokens_by_source.local_compute",
    "tokens.prompt_local_cache": "prompt_tokens_by_source.local_cache_hit",
    "tokens.prompt_external_cache": "prompt_tokens_by_source.external_kv_transfer",
    "preemptions": "num_preemptions",
    "corrupted": "corrupted_requests",
    "spec_decode.draft_tokens": "spec_decode_num_draft_tokens",
    "spec_decode.accepted_tokens": "spec_decode_num_accepted_tokens",
    "scheduler_records": "scheduler_steps",
    **{f"{cache}.{field}": f"{cache}_{field}" for cache in _CACHES for field in ("queries", "hits")},
}
_GROUPS = {"finished": "request_success", "rejected": "admission_rejections", "sleep": "sleep_events"}
_DISTRIBUTIONS = {
    "ttft_seconds": "time_to_first_token_seconds",
    "inter_token_seconds": "inter_token_latency_seconds",
    "e2e_seconds": "e2e_request_latency_seconds",
    "queue_seconds": "request_queue_time_seconds",
    "prefill_seconds": "request_prefill_time_seconds",
    "decode_seconds": "request_decode_time_seconds",
    "prompt_tokens": "request_prompt_tokens",
    "generation_tokens": "request_generation_tokens",
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "waiting_deferred": "num_requests_waiting_by_reason.deferred",
    "kv_cache_usage": "kv_cache_usage_perc",
}


def upgraded(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of version 1 as one of today's; what it did not know is absent."""
    counters = Counter({_counter(name): value for name, value in line["counters"].items()})
    cached = sum(counters[f"prompt_tokens_by_source.{tier}"] for tier in ("local_cache_hit", "external_kv_transfer"))
    known = {"prompt_tokens_cached": cached} if cached else {}
    return line | {
        "counters": counters | known,
        "totals_nano": {},
        "gauges": {},
        "distributions": {_DISTRIBUTIONS.get(name, name): value for name, value in line["distributions"].items()},
    }


def _counter(name: str) -> str:
    group, _, label = name.partition(".")
    return _COUNTERS.get(name) or (f"{_GROUPS[group]}.{label}" if group in _GROUPS else name)
