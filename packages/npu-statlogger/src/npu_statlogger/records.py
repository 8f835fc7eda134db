"""Lines of single requests and steps, made from vLLM's records by sampling."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

from npu_statlogger.lines import RequestLine, StepLine

if TYPE_CHECKING:
    from npu_statlogger.config import StatLoggerConfig

__all__ = ["Sampler"]

_HASHED = 1 << 64


class Sampler:
    """Chooses requests and steps by the settings, and makes their lines."""

    def __init__(self, config: StatLoggerConfig, process: str, model: str) -> None:
        self._config, self._process, self._model = config, process, model
        self._random = random.Random()  # noqa: S311 # which steps have a line is no secret
        self._last_step: dict[int, float] = {}

    @property
    def on(self) -> bool:
        """Whether anything may have a line."""
        return bool(self._config.requests or self._config.slow_seconds or self._config.steps)

    def requests(self, engine: int, time: float, stats: Any) -> list[RequestLine]:
        """Return lines of some of the requests that an IterationStats finished.

        A request is chosen by a hash of its id, so that all processes and attempts choose the same ones.
        """
        if not (self._config.requests or self._config.slow_seconds):
            return []
        end = getattr(stats, "iteration_timestamp", time)
        weighed = ((request, self._weight(request)) for request in getattr(stats, "finished_requests", ()))
        return [self._request(engine, end, request, weight) for request, weight in weighed if weight]

    def step(self, engine: int, time: float, scheduler: Any, iteration: Any) -> list[StepLine]:
        """Return the line of a step, or none."""
        fraction = self._config.steps
        if not fraction or scheduler is None:
            return []
        seconds = time - self._last_step.get(engine, time)
        self._last_step[engine] = time
        if self._random.random() >= fraction:
            return []
        deferred = getattr(scheduler, "num_skipped_waiting_reqs", 0)
        prompt = getattr(iteration, "prompt_token_stats", None)
        drafts = getattr(scheduler, "spec_decoding_stats", None)
        return [
            StepLine(
                time=time,
                process=self._process,
                engine=engine,
                seconds=seconds,
                running=getattr(scheduler, "num_running_reqs", 0),
                waiting=getattr(scheduler, "num_waiting_reqs", 0) + deferred,
                deferred=deferred,
                kv_cache_usage=getattr(scheduler, "kv_cache_usage", 0.0),
                prompt_tokens=getattr(prompt, "computed", 0),
                cached_tokens=getattr(prompt, "cached_tokens", 0),
                generation_tokens=getattr(iteration, "num_generation_tokens", 0),
                first_tokens=len(getattr(iteration, "time_to_first_tokens_iter", ())),
                finished=len(getattr(iteration, "finished_requests", ())),
                preemptions=getattr(iteration, "num_preempted_reqs", 0),
                draft_tokens=getattr(drafts, "num_draft_tokens", 0),
                accepted_tokens=getattr(drafts, "num_accepted_tokens", 0),
                weight=1 / fraction,
            )
        ]

    def _weight(self, request: Any) -> float:
        """Return how many requests one stands for, 0 if it has no line. A slow one stands for itself alone."""
        slow = self._config.slow_seconds
        if slow and getattr(request, "e2e_latency", 0.0) >= slow:
            return 1.0
        fraction = self._config.requests
        chosen = fraction and _hash(getattr(request, "request_id", "")) < fraction * _HASHED
        return 1 / fraction if chosen else 0.0

    def _request(self, engine: int, time: float, request: Any, weight: float) -> RequestLine:
        e2e = getattr(request, "e2e_latency", 0.0)
        queue, prefill = getattr(request, "queued_time", 0.0), getattr(request, "prefill_time", 0.0)
        return RequestLine(
            time=time,
            process=self._process,
            model=self._model,
            engine=engine,
            request_id=self._name(getattr(request, "request_id", "")),
            arrival=time - e2e,
            finish_reason=str(getattr(request, "finish_reason", "unknown")),
            e2e_seconds=e2e,
            queue_seconds=queue,
            prefill_seconds=prefill,
            decode_seconds=getattr(request, "decode_time", 0.0),
            inference_seconds=getattr(request, "inference_time", 0.0),
            first_token_seconds=queue + prefill,
            time_per_output_token_seconds=getattr(request, "mean_time_per_output_token", 0.0),
            prompt_tokens=getattr(request, "num_prompt_tokens", 0),
            cached_tokens=max(getattr(request, "num_cached_tokens", 0), 0),
            generation_tokens=getattr(request, "num_generation_tokens", 0),
            max_tokens=getattr(request, "max_tokens_param", None) or 0,
            preemptions=getattr(request, "num_preemptions", 0),
            corrupted=int(getattr(request, "is_corrupted", False)),
            weight=weight,
        )

    def _name(self, request_id: str | None) -> str:
        match self._config.request_ids:
            case "plain":
                return request_id or ""
            case "hash":
                return f"{_hash(request_id):016x}"
            case _:
                return ""


def _hash(request_id: str | None) -> int:
    return int.from_bytes(hashlib.blake2b((request_id or "").encode(), digest_size=8).digest())
