"""OutputTokens: what each request of a batch has said so far, kept on the device and longer by a token a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ROOM = 256
"""Tokens by which the tensor grows, so that it is not allocated anew in each step."""


@dataclass
class _Followed:
    """One of vLLM's lists, and how many of its tokens the device has; the list is held, so that no other can be it."""

    tokens: list[int]
    settled: int = 0
    last: int = -1

    def goes_on_in(self, tokens: list[int]) -> bool:
        """Say whether this is the list, which vLLM lengthens, and shortens when a request is computed again."""
        if self.tokens is not tokens or len(tokens) < self.settled:
            return False
        return not self.settled or tokens[self.settled - 1] == self.last


class OutputTokens:
    """Follows vLLM's lists of output tokens, of which a step lengthens each; copies what is new of them."""

    def __init__(self) -> None:
        """Follow nobody yet."""
        self._rows: list[_Followed] = []
        self._tokens = torch.empty(0, 0, dtype=torch.int64)

    def follow(self, outputs: list[list[int]], device: torch.device) -> torch.Tensor:
        """Return int64 [requests, most tokens or some more], padded with -1; valid until the next call."""
        self._make_room(len(outputs), max(map(len, outputs), default=0), device)
        known: list[_Followed | None] = [*self._rows[: len(outputs)], *[None] * (len(outputs) - len(self._rows))]
        self._rows = [
            row if row is not None and row.goes_on_in(tokens) else self._begin(index, tokens)
            for index, (row, tokens) in enumerate(zip(known, outputs, strict=True))
        ]
        self._append()
        return self._tokens[: len(outputs)]

    def _make_room(self, requests: int, longest: int, device: torch.device) -> None:
        rows, width = self._tokens.shape
        # Padding is read, too: the tensor becomes narrow again when a long request has left.
        if self._tokens.device != device or rows < requests or not longest <= width <= 2 * (longest + _ROOM):
            self._rows = []
            self._tokens = torch.full((requests, longest + _ROOM), -1, dtype=torch.int64, device=device)

    def _begin(self, index: int, tokens: list[int]) -> _Followed:
        self._tokens[index].fill_(-1)
        return _Followed(tokens)

    def _append(self) -> None:
        where: list[tuple[int, int, int]] = []
        for index, row in enumerate(self._rows):
            end = len(row.tokens)
            while end > row.settled and row.tokens[end - 1] == -1:  # vLLM does not know these yet
                end -= 1
            where += ((index, at, row.tokens[at]) for at in range(row.settled, end))
            row.settled, row.last = end, row.tokens[end - 1] if end else -1
        if where:
            rows, columns, tokens = torch.tensor(where, device=self._tokens.device).unbind(1)
            self._tokens.index_put_((rows, columns), tokens)
