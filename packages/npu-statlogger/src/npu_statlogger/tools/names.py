"""Names of the figures that the commands show, and what people call them."""

from __future__ import annotations

__all__ = ["LABELS", "LATENCIES", "LOAD", "finished", "label"]

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
TPOT = "time_per_output_token_seconds"
E2E = "e2e_request_latency_seconds"
QUEUE = "request_queue_time_seconds"
PREFILL = "request_prefill_time_seconds"
DECODE = "request_decode_time_seconds"
RUNNING = "num_requests_running"
WAITING = "num_requests_waiting"
KV_USAGE = "kv_cache_usage_perc"
COMPUTED = "prompt_tokens_by_source.local_compute"
GENERATED = "generation_tokens"
PREEMPTIONS = "num_preemptions"
DRAFTED = "spec_decode_num_draft_tokens"
ACCEPTED = "spec_decode_num_accepted_tokens"
DRAFTS = "spec_decode_num_drafts"
FINISHED = "request_success."
REJECTED = "admission_rejections."
CACHES = ("prefix_cache", "external_prefix_cache", "mm_cache")

LATENCIES = (TTFT, ITL, TPOT, E2E, QUEUE, PREFILL, DECODE)
LOAD = (RUNNING, WAITING, KV_USAGE)

LABELS = {
    TTFT: "time to first token",
    ITL: "between tokens",
    TPOT: "per output token",
    E2E: "end to end",
    QUEUE: "queue",
    PREFILL: "prefill",
    DECODE: "decode",
    RUNNING: "running",
    WAITING: "waiting",
    KV_USAGE: "KV cache in use",
    "prompt_tokens_total_per_second": "prompt tokens, with cached ones",
    "prompt_tokens_computed_per_second": "prompt tokens computed",
    "generation_tokens_per_second": "tokens generated",
    "requests_per_second": "requests finished",
    "prefix_cache_hit_rate": "prefix cache hits",
    "external_prefix_cache_hit_rate": "KV connector hits",
    "mm_cache_hit_rate": "multimodal cache hits",
    "draft_acceptance_rate": "drafted tokens accepted",
}


def label(name: str) -> str:
    """Return what people call a figure; the name itself where there is no other."""
    return LABELS.get(name, name)


def finished(counters: dict[str, int]) -> int:
    """Return how many requests finished, for whatever reason."""
    return sum(count for name, count in counters.items() if name.startswith(FINISHED))
