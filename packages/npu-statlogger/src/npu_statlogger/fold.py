"""How vLLM's per-step records become the figures of metrics.METRICS.

vLLM declares these records unstable, so each field is read by name with a default: a field that a later vLLM renames
goes missing from the lines and does not stop a server. tests/test_fold.py builds vLLM's own records and fails first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from npu_statlogger.metrics import labelled
from npu_statlogger.sketch import ABSURD, NANO

__all__ = ["Batch", "fold_iteration", "fold_mm_cache", "fold_scheduler"]

_FINISHED = {
    "e2e_request_latency_seconds": "e2e_latency",
    "request_queue_time_seconds": "queued_time",
    "request_prefill_time_seconds": "prefill_time",
    "request_decode_time_seconds": "decode_time",
    "request_inference_time_seconds": "inference_time",
    "request_num_preemptions": "num_preemptions",
    "request_prompt_tokens": "num_prompt_tokens",
    "request_generation_tokens": "num_generation_tokens",
    "request_cached_tokens": "num_cached_tokens",
    "request_time_per_output_token_seconds": "mean_time_per_output_token",
}
"""Distribution over finished requests -> field of vLLM's FinishedRequestStats."""

_ITERATION_COUNTERS = {
    "generation_tokens": "num_generation_tokens",
    "num_preemptions": "num_preempted_reqs",
    "corrupted_requests": "num_corrupted_reqs",
    "watermark_requests.watermarked": "num_watermarked_reqs",
    "watermark_requests.skipped": "num_watermark_skipped_reqs",
    "watermark_requests.not_watermarked": "num_not_watermarked_reqs",
}
_PROMPT_COUNTERS = {
    "prompt_tokens": "total",
    "prompt_tokens_cached": "cached_tokens",
    "prompt_tokens_by_source.local_compute": "computed",
    "prompt_tokens_by_source.local_cache_hit": "local_cache_hit",
    "prompt_tokens_by_source.external_kv_transfer": "external_kv_transfer",
}
_ITERATION_SPREADS = {
    "time_to_first_token_seconds": "time_to_first_tokens_iter",
    "inter_token_latency_seconds": "inter_token_latencies_iter",
    "request_max_num_generation_tokens": "max_num_generation_tokens_iter",
    "request_params_n": "n_params_iter",
}
_PERF = ("flops", "read_bytes", "write_bytes")
_GRAPH = ("unpadded_tokens", "padded_tokens", "paddings")
_DETAIL_SPREADS = ("ctx_requests", "ctx_tokens", "generation_requests", "generation_tokens")
_DETAIL_COUNTERS = ("encoder_inputs", "encoder_output_tokens")


@dataclass
class Batch:
    """Counts and raw values of some steps, so that a distribution takes in many values at once."""

    counters: Counter[str] = field(default_factory=Counter)
    totals_nano: Counter[str] = field(default_factory=Counter)
    gauges: dict[str, tuple[float, float]] = field(default_factory=dict)
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    finished: list[Any] = field(default_factory=list)
    """Finished requests that `settle` has yet to count: all at once is several times faster."""

    def count(self, name: str, amount: Any) -> None:
        """Add to a counter, or to a total if the amount is no whole number's type; 0 and None leave no trace."""
        if hasattr(amount, "__index__"):  # which whole numbers of numpy have too
            if amount:
                self.counters[name] += int(amount)
        elif amount is not None and self._is_number(float(amount)):
            self.totals_nano[name] += round(float(amount) * NANO)

    def gauge(self, name: str, value: Any, time: float) -> bool:
        """Set a gauge and tell whether it was: None leaves it as it is, what is not finite is counted as such."""
        if value is None:
            return False
        number = float(value)
        known = self._is_number(number)
        if known:
            self.gauges[name] = (time, number)
        return known

    def add(self, name: str, values: Any) -> None:
        """Add values to a distribution."""
        if len(values):
            self.values[name] += values

    def add_known(self, name: str, values: Any) -> None:
        """Do as `add`; None stands for a value that is not known."""
        self.add(name, [value for value in values if value is not None])

    def settle(self) -> None:
        """Count the finished requests; to be called once behind the last record."""
        requests, self.finished = self.finished, []
        if requests:
            _fold_finished(self, requests)

    def _is_number(self, value: float) -> bool:
        """Tell whether a value is finite and not beyond all bounds; count it if it is not."""
        fine = abs(value) < ABSURD
        if not fine:
            self.counters["values_not_finite"] += 1
        return fine


def fold_scheduler(batch: Batch, stats: Any, time: float = 0.0, adapters: set[str] | None = None) -> None:
    """Add one vllm.v1.metrics.stats.SchedulerStats that arrived at `time` (seconds since the epoch).

    `adapters` holds the gauges of the adapters that the engine's step before named, and those of this one afterwards.
    """
    batch.counters["scheduler_steps"] += 1
    _fold_load(batch, stats, time)
    _fold_adapters(batch, stats, time, set() if adapters is None else adapters)
    device = getattr(stats, "prefix_cache_stats", None)
    _fold_cache(batch, "prefix_cache", device)
    batch.count(labelled("prompt_tokens_cached_by_source", "device"), getattr(device, "hits", 0))
    external = getattr(stats, "connector_prefix_cache_stats", None)
    _fold_cache(batch, "external_prefix_cache", external)
    for tier, tokens in getattr(external, "hits_by_source", {}).items():
        batch.count(labelled("prompt_tokens_cached_by_source", getattr(tier, "value", tier)), tokens)
    _fold_evictions(batch, getattr(stats, "kv_cache_eviction_events", ()))
    _fold_speculation(batch, getattr(stats, "spec_decoding_stats", None))
    _fold_execution(batch, stats, time)


def fold_iteration(batch: Batch, stats: Any) -> None:
    """Add one vllm.v1.metrics.stats.IterationStats: latencies, tokens, preemptions, finished requests."""
    prompt = getattr(stats, "prompt_token_stats", None)
    for names, record in ((_ITERATION_COUNTERS, stats), (_PROMPT_COUNTERS, prompt)):
        for name, attribute in names.items():
            batch.count(name, getattr(record, attribute, 0))
    if prompt is not None:
        batch.add("iteration_tokens_total", [prompt.computed + getattr(stats, "num_generation_tokens", 0)])
    for name, attribute in _ITERATION_SPREADS.items():
        batch.add(name, getattr(stats, attribute, ()))
    batch.finished += getattr(stats, "finished_requests", ())


def fold_mm_cache(batch: Batch, stats: Any) -> None:
    """Add one vllm.v1.metrics.stats.MultiModalCacheStats."""
    _fold_cache(batch, "mm_cache", stats)


def _fold_load(batch: Batch, stats: Any, time: float) -> None:
    waiting = getattr(stats, "num_waiting_reqs", None)
    deferred = getattr(stats, "num_skipped_waiting_reqs", None)
    load: dict[str, Any] = {
        "num_requests_running": getattr(stats, "num_running_reqs", None),
        # As vLLM's own log and metrics count them; the deferred ones wait, for instance, for a KV connector's load.
        "num_requests_waiting": None if waiting is None else waiting + (deferred or 0),
        "num_requests_waiting_by_reason.capacity": waiting,
        "num_requests_waiting_by_reason.deferred": deferred,
        "kv_cache_usage_perc": getattr(stats, "kv_cache_usage", None),
    }
    for name, value in load.items():
        if batch.gauge(name, value, time):
            batch.values[name].append(value)
    for stage, value in getattr(stats, "num_kv_fetch_reqs_by_stage", {}).items():
        batch.gauge(labelled("num_requests_kv_fetch_by_stage", stage), value, time)
    batch.gauge("engine_wave", getattr(stats, "current_wave", None), time)
    batch.gauge("engine_step_counter", getattr(stats, "step_counter", None), time)


def _fold_adapters(batch: Batch, stats: Any, time: float, adapters: set[str]) -> None:
    """Set the gauges of adapters; vLLM leaves idle ones out, so what is no longer named is 0."""
    named = {
        labelled(f"lora_requests_{state}", adapter): value
        for state in ("running", "waiting")
        for adapter, value in getattr(stats, f"{state}_lora_adapters", {}).items()
    }
    for name, value in (dict.fromkeys(adapters, 0) | named).items():
        batch.gauge(name, value, time)
    adapters.clear()
    adapters.update(named)


def _fold_cache(batch: Batch, name: str, stats: Any) -> None:
    if stats is None:
        return
    for field_name in ("queries", "hits", "requests", "preempted_requests", "preempted_queries", "preempted_hits"):
        batch.count(f"{name}_{field_name}", getattr(stats, field_name, 0))
    batch.count(f"{name}_resets", int(getattr(stats, "reset", False)))


def _fold_evictions(batch: Batch, events: Any) -> None:
    if not events:
        return
    batch.add("kv_block_lifetime_seconds", [event.lifetime_seconds for event in events])
    batch.add("kv_block_idle_before_evict_seconds", [event.idle_seconds for event in events])
    for event in events:
        batch.add("kv_block_reuse_gap_seconds", event.reuse_gaps_seconds)


def _fold_speculation(batch: Batch, drafts: Any) -> None:
    if drafts is None:
        return
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        batch.count(f"spec_decode_{name}", getattr(drafts, name, 0))
    for name in ("num_accepted_tokens_per_pos", "num_draft_tokens_per_pos"):
        for position, tokens in enumerate(getattr(drafts, name, ())):
            batch.count(labelled(f"spec_decode_{name}", position), tokens)


def _fold_execution(batch: Batch, stats: Any, time: float) -> None:
    """Add what vLLM gives only if asked: estimates of the work, use of graphs, details of the step."""
    perf = getattr(stats, "perf_stats", None)
    for name in _PERF if perf is not None else ():
        batch.count(f"estimated_{name}_per_gpu", getattr(perf, f"num_{name}_per_gpu", 0))
    graph = getattr(stats, "cudagraph_stats", None)
    if graph is not None:
        batch.count(labelled("cudagraph_steps", graph.runtime_mode), 1)
        for name in _GRAPH:
            batch.count(labelled(f"cudagraph_{name}", graph.runtime_mode), getattr(graph, f"num_{name}", 0))
    details = getattr(stats, "iteration_details", None)
    if details is None:
        return
    batch.gauge("iteration_index", getattr(details, "iteration_index", None), time)
    batch.count("iteration_dummy_steps", int(getattr(details, "is_dummy", False)))
    batch.add("iteration_elapsed_seconds", [details.elapsed_ms / 1e3])
    for name in _DETAIL_SPREADS:
        batch.add_known(f"iteration_{name}", [getattr(details, f"num_{name}", None)])
    for name in _DETAIL_COUNTERS:
        batch.count(f"iteration_{name}", getattr(details, f"num_{name}", 0))


def _fold_finished(batch: Batch, requests: Any) -> None:
    for reason, number in Counter(getattr(request, "finish_reason", "unknown") for request in requests).items():
        # str() of vLLM's FinishReason is what the API answers: stop, length, abort, error, repetition.
        batch.count(labelled("request_success", reason), number)
    for name, attribute in _FINISHED.items():
        batch.add_known(name, [getattr(request, attribute, None) for request in requests])
    per_token = [getattr(request, "mean_time_per_output_token", None) for request in requests]
    batch.add("time_per_output_token_seconds", [value for value in per_token if value])
    limits = [getattr(request, "max_tokens_param", None) for request in requests]
    batch.add("request_params_max_tokens", [value for value in limits if value])
    tokens = [
        (getattr(request, "num_prompt_tokens", None), getattr(request, "num_cached_tokens", 0)) for request in requests
    ]
    # vLLM's unknown number of cached tokens is -1.
    computed = [prompt - max(cached, 0) for prompt, cached in tokens if prompt is not None]
    batch.add("request_prefill_kv_computed_tokens", computed)
