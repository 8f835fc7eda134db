"""States of recurrent layers are copied between blocks of the cache: that of each draft is in a block of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_platform.state_copies import after_step, before_step

BLOCKS, WIDTH, CHANNELS, BLOCK_SIZE = 12, 5, 3, 4
CONSTANTS: dict[str, Any] = {"COPY_BLOCK_SIZE": 1024, "TEMPORAL_TILES": 1}


@dataclass(frozen=True)
class Cache:
    """The states of one layer: those of a convolution, which `channels_first` turns over, and of a recurrence."""

    convolution: Tensor
    recurrence: Tensor
    table: Tensor
    channels_first: bool

    def layout(self) -> list[Tensor]:
        """Return what vLLM says of the states, in its kernels' order."""
        states = (self.convolution, self.recurrence)
        inner = [1 if self.channels_first else CHANNELS, self.recurrence[0].numel()]
        rows = [CHANNELS if self.channels_first else 0, 0]
        row = [WIDTH * 4 if self.channels_first else 0, 0]
        fields = [[state.data_ptr() for state in states], [state.stride(0) * 4 for state in states], [4, 4]]
        return [torch.tensor(field).npu() for field in (*fields, inner, [WIDTH, 0], [0, 0], rows, row)]

    def window(self, block: int) -> Tensor:
        """Return the tokens of a convolution's state [tokens, channels]."""
        state = self.convolution[block].cpu()
        return state.t() if self.channels_first else state


@pytest.fixture(params=[False, True], ids=["tokens-first", "channels-first"])
def cache(request: pytest.FixtureRequest) -> Cache:
    generator = torch.Generator().manual_seed(0)
    shape = (CHANNELS, WIDTH) if request.param else (WIDTH, CHANNELS)
    convolution = torch.randn(BLOCKS, *shape, generator=generator).npu()
    recurrence = torch.randn(BLOCKS, 2, CHANNELS, generator=generator).npu()
    table = torch.tensor([[1, 2, 3, 4, 0], [5, 6, 7, 8, 9]], dtype=torch.int32).npu()
    return Cache(convolution, recurrence, table, request.param)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).npu()


def pointers(table: Tensor) -> tuple[Tensor, int]:
    return torch.tensor([table.data_ptr()]).npu(), table.stride(0)


def test_a_step_begins_in_a_new_block(cache: Cache) -> None:
    """The first request has no block yet; two drafts of the second were accepted."""
    window, state = cache.window(8).clone(), cache.recurrence[8].cpu()
    untouched = cache.recurrence[[0, 1, 2, 3, 4, 5, 6, 8, 9]].cpu()
    moves = (numbers(0, 2), numbers(-1, 1), numbers(0, 2))
    before_step(*moves, *pointers(cache.table), *cache.layout(), None, 2, HAS_IDX_MAPPING=False, **CONSTANTS)
    assert torch.equal(cache.window(7), window)
    assert torch.equal(cache.recurrence[7].cpu(), state)
    assert torch.equal(cache.recurrence[[0, 1, 2, 3, 4, 5, 6, 8, 9]].cpu(), untouched)


def after(cache: Cache, accepted: Tensor, source: Tensor, computed: Tensor) -> Tensor:
    """Run what comes after a step of four tokens of each request, of which three were drafts."""
    out = accepted.clone()
    step = (accepted, source, numbers(4, 4), computed, numbers(3, 3))
    options = CONSTANTS | {"block_size": BLOCK_SIZE, "CONV_STATE_DIM_FIRST": cache.channels_first}
    after_step(*step, *pointers(cache.table), *cache.layout(), out, None, 2, **options)
    return out.cpu()


def test_a_step_goes_beyond_a_block(cache: Cache) -> None:
    """The first request has 7 tokens and one more, accepted 3 of them: the state after its 8th is kept in block 1."""
    window, state = cache.window(3).clone(), cache.recurrence[3].cpu()
    out = after(cache, numbers(3, 2), numbers(2, 2), numbers(7, 8))
    assert torch.equal(cache.window(2), window)
    assert torch.equal(cache.recurrence[2].cpu(), state)
    assert out.tolist() == [3, 2], "nothing of the second is at the end of a block"


def test_a_block_that_ends_among_drafts(cache: Cache) -> None:
    """The second request has 10 tokens; with the first draft of three it has 12, and stays in the block where it is."""
    window, state = cache.window(8).clone(), cache.recurrence[8].cpu()
    out = after(cache, numbers(1, 2), numbers(2, 2), numbers(4, 10))
    assert torch.equal(cache.window(7), window)
    assert torch.equal(cache.recurrence[7].cpu(), state)
    assert out.tolist() == [1, 1]
