"""How far an engine's logprobs or embeddings are from the truth, beside how far transformers' own are in the same dtype.

The truth is transformers in float32, on the weights and with the rounding that the checkpoint stands for. Both errors
are of the same requests and tokens, so their quotient says what the engine adds to the noise of the dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.judges import Embedder, Judge

__all__ = ["Errors", "of_embeddings", "of_logprobs"]

MOST = 2.0


@dataclass(frozen=True)
class Errors:
    """The engine's errors and transformers', a value for each; and where their experts are beyond doubt, if that is known."""

    ours: torch.Tensor
    theirs: torch.Tensor
    sure: torch.Tensor | None = None

    def assert_within(self, times: float) -> None:
        """Assert that the root mean square of ours is at most `times` that of transformers'."""
        self._compare(times, self.ours, self.theirs)

    def assert_most_within(self, times: float) -> None:
        """As assert_within without the largest tenth of each, and with it, where experts are sure, at most MOST times.

        For mixtures of experts: where two are as good as each other, noise chooses, and a few steps are off by far more.
        """
        self._compare(
            times, *(errors.abs().sort().values[: int(0.9 * len(errors))] for errors in (self.ours, self.theirs))
        )
        sure = slice(None) if self.sure is None else self.sure
        self._compare(MOST, self.ours[sure], self.theirs[sure])

    def _compare(self, times: float, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        a, b = (errors.square().mean().sqrt().item() for errors in (ours, theirs))
        said = f"rms error {a:.5f}, transformers' {b:.5f}: {a / b:.2f} times"
        print(said)
        assert b > 0, "a judge without noise of its own cannot bound ours"
        assert a <= times * b, f"{said}, more than {times}"


def of_logprobs(
    exact: Judge,
    rounded: Judge,
    asked: Sequence[dict[str, Any]],
    outputs: Sequence[dict[str, Any]],
    sure: Judge | None = None,
) -> Errors:
    """Return the errors of the chosen tokens' logprobs; `asked` and `outputs` are the requests of a greedy round.

    A token that noise made the best has a logprob as far off, so it counts as well; the engine's own best it must be.
    `sure` says of each step, as bool [len(continuation)], whether its experts are beyond doubt.
    """
    ours, theirs = [], []
    for request, output in zip(asked, outputs, strict=True):
        assert output["logprobs"] == output["best"], "greedy sampling took another token than the best"
        tokens = torch.tensor(output["tokens"])[:, None]
        truth, noise = (judge(request, output["tokens"]).gather(1, tokens)[:, 0] for judge in (exact, rounded))
        ours.append(torch.tensor(output["logprobs"]) - truth)
        theirs.append(noise - truth)
    pairs = zip(asked, outputs, strict=True)
    clear = None if sure is None else torch.cat([sure(request, output["tokens"]) for request, output in pairs])
    return Errors(torch.cat(ours), torch.cat(theirs), clear)


def of_embeddings(
    exact: Embedder, rounded: Embedder, asked: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]]
) -> Errors:
    """Return the errors of embeddings of length 1."""
    truth = [exact(request) for request in asked]
    ours = [torch.tensor(output["embedding"]) - one for output, one in zip(outputs, truth, strict=True)]
    theirs = [rounded(request) - one for request, one in zip(asked, truth, strict=True)]
    return Errors(torch.cat(ours), torch.cat(theirs))
