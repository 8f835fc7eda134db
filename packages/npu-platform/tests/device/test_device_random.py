"""Random numbers that the device makes by itself: exponential ones."""

from __future__ import annotations

import pytest
import torch

DEVICE = "npu"


def drawn(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float32, rate: float = 1.0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=DEVICE).exponential_(rate).cpu()


def test_the_same_seed_gives_the_same_numbers_and_the_next_draw_others() -> None:
    first, again = drawn(3, 1001), drawn(3, 1001)
    assert torch.equal(first, again)
    assert not torch.equal(torch.empty(3, 1001, device=DEVICE).exponential_().cpu(), first)
    assert not torch.equal(drawn(3, 1001, seed=8), first)


def test_threads_do_not_matter() -> None:
    threads = torch.npu.get_num_threads()
    expected = drawn(100_003)
    torch.npu.set_num_threads(1)
    alone = drawn(100_003)
    torch.npu.set_num_threads(threads)
    assert torch.equal(alone, expected)


def test_a_generator_has_numbers_of_its_own() -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)
    state = generator.get_state()
    first = torch.empty(50, device=DEVICE).exponential_(generator=generator)
    second = torch.empty(50, device=DEVICE).exponential_(generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.empty(50, device=DEVICE).exponential_(generator=generator), first)
    assert not torch.equal(first, second)
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator"):
        torch.empty(50, device=DEVICE).exponential_(generator=torch.Generator())


@pytest.mark.parametrize("rate", [1.0, 0.25, 7.0])
def test_numbers_are_distributed_exponentially(rate: float) -> None:
    """Kolmogorov-Smirnov: the largest gap between the distributions, beyond which one in a million runs would be."""
    count = 400_000
    values = drawn(count, dtype=torch.float64, rate=rate).sort().values
    assert values[0] > 0
    expected = -torch.expm1(-rate * values)
    gap = (expected - torch.arange(count) / count).abs().max()
    assert gap < 2.7 / count**0.5
    # the smallest decide which token is taken: their spacing is not that of numbers near one
    assert len(values.float().unique()) > 0.99 * count


def test_neighbours_are_independent() -> None:
    values = drawn(200_000).double() - 1
    for distance in (1, 2, 8, 1024):
        correlation = (values[distance:] * values[:-distance]).mean()
        assert abs(correlation) < 5 / len(values) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_round_the_same_numbers(dtype: torch.dtype) -> None:
    torch.testing.assert_close(drawn(999, dtype=dtype).float(), drawn(999), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_layouts_that_are_not_dense_get_the_numbers_of_dense_ones() -> None:
    torch.manual_seed(7)
    wide = torch.zeros(10, 20, device=DEVICE)
    wide[:, ::2].exponential_()
    assert torch.equal(wide[:, ::2].cpu(), drawn(10, 10))
    assert not wide[:, 1::2].any()


def test_each_replay_of_a_graph_draws_anew() -> None:
    values = torch.empty(100, device=DEVICE)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        values.exponential_()
    torch.manual_seed(7)
    graph.replay()
    first = values.cpu()
    graph.replay()
    assert torch.equal(first, drawn(100))
    assert not torch.equal(values.cpu(), first)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RuntimeError, match="lambda > 0.0, but found lambda=0"):
        torch.empty(3, device=DEVICE).exponential_(0.0)
    with pytest.raises(RuntimeError, match="floating-point"):
        torch.empty(3, device=DEVICE, dtype=torch.int32).exponential_()
    assert torch.empty(0, device=DEVICE).exponential_().numel() == 0
