"""One finished request, from wherever it is known: a request line, a client's result, a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from npu_statlogger.lines import RequestLine

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """Times in seconds, `arrival` since the epoch; what is not known, or is not there, is None."""

    arrival: float
    e2e: float
    ttft: float | None
    tpot: float | None
    """Per output token after the first; None for a request of one token."""

    prompt_tokens: int
    generation_tokens: int
    reason: str
    cached_tokens: int = 0
    weight: float = 1.0
    """Requests that it stands for, where not all were recorded."""

    @classmethod
    def of_line(cls, line: RequestLine) -> Self:
        """Return the request of a line."""
        return cls(
            arrival=line.arrival,
            e2e=line.e2e_seconds,
            ttft=line.first_token_seconds or None,
            tpot=line.time_per_output_token_seconds or None,
            prompt_tokens=line.prompt_tokens,
            generation_tokens=line.generation_tokens,
            reason=line.finish_reason,
            cached_tokens=line.cached_tokens,
            weight=line.weight,
        )

    @classmethod
    def of_client(cls, arrival: float, e2e: float, ttft: float | None, tokens: tuple[int, int], reason: str) -> Self:
        """Return a request as its client saw it; `tokens` are those of the prompt and of the answer."""
        prompt, generated = tokens
        tpot = (e2e - ttft) / (generated - 1) if ttft is not None and generated > 1 else None
        return cls(arrival, e2e, ttft, tpot, prompt, generated, reason)

    @property
    def end(self) -> float:
        """When its last token came."""
        return self.arrival + self.e2e
