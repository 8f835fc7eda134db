"""How near an engine's answers are to another's: tokens as far as they agree, and the logprobs of what was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Nearness", "between"]

_KEPT = 0.9  # of the differences, the smallest: where two experts are as good as each other, noise chooses


@dataclass(frozen=True)
class Nearness:
    """Of greedy requests: the share whose tokens are all equal, and what differs in logprobs, in nats.

    `typical` is the root mean square of the differences without their largest tenth. `gaps` are of the first tokens that
    differ: how much less likely the baseline holds the other token than its own.
    """

    equal: float
    typical: float
    gaps: list[float]

    @property
    def widest(self) -> float:
        """Return the widest gap; 0 where all tokens are equal."""
        return max(self.gaps, default=0.0)


def between(baseline: list[dict[str, Any]], others: list[dict[str, Any]]) -> Nearness:
    """Compare the outputs of a round (``tests.support.engine_run``, with logprobs) with those of the baseline."""
    differences, gaps, equal = [], [], 0
    for one, other in zip(baseline, others, strict=True):
        same = _common(one["tokens"], other["tokens"])
        differences += [abs(a - b) for a, b in zip(one["logprobs"][:same], other["logprobs"][:same], strict=True)]
        equal += same == len(one["tokens"]) == len(other["tokens"])
        if same < min(len(one["tokens"]), len(other["tokens"])):
            known = one["known"][same]  # a token that is not known is less likely than all of these
            gaps.append(one["best"][same] - known.get(str(other["tokens"][same]), min(known.values())))
    kept = torch.tensor(sorted(differences)[: max(1, int(_KEPT * len(differences)))] or [0.0])
    return Nearness(equal / len(baseline), kept.square().mean().sqrt().item(), gaps)


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
