"""Generators of the device: that checkpoints draw again what they drew, copies, and the tensors that they are not for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DEVICE = "npu"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_dropout_in_a_checkpoint_drops_the_same_values_again(use_reentrant: bool) -> None:
    torch.ones(1, device=DEVICE)
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.ReLU()).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor | None:
        torch.manual_seed(1)
        x.grad = None
        run(x).sum().backward()
        return x.grad

    plain = gradient(module)
    assert torch.equal(gradient(lambda x: checkpoint(module, x, use_reentrant=use_reentrant)), plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda generator: pickle.loads(pickle.dumps(generator))])
def test_a_copy_goes_on_where_the_generator_was(copied: Callable[[torch.Generator], torch.Generator]) -> None:
    generator = torch.Generator(DEVICE).manual_seed(5)
    torch.rand(7, device=DEVICE, generator=generator)
    other = copied(generator)
    assert (other.device.type, other.initial_seed()) == (DEVICE, 5)
    drawn = [torch.rand(9, device=DEVICE, generator=each) for each in (generator, other)]
    assert torch.equal(*drawn)


def test_the_one_offset_is_zero() -> None:
    generator = torch.Generator(DEVICE)
    generator.set_offset(0)
    assert generator.get_offset() == 0
    with pytest.raises(NotImplementedError, match=r"no offset .* but 0, got 4; use get_state"):
        generator.set_offset(4)


def test_a_generator_of_the_host_is_no_state_of_the_device() -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        generator.graphsafe_set_state(torch.Generator())
    assert torch.rand(3, device=DEVICE, generator=generator).device.type == DEVICE


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: torch.rand(3, generator=generator),
        lambda generator: torch.randint(9, (3,), generator=generator),
        lambda generator: torch.randperm(5, generator=generator),
        lambda generator: torch.empty(3).normal_(generator=generator),
        lambda generator: torch.empty(3).exponential_(generator=generator),
        lambda generator: torch.bernoulli(torch.ones(3) / 2, generator=generator),
        lambda generator: torch.multinomial(torch.ones(3), 2, generator=generator),
    ],
)
def test_tensors_of_the_host_take_numbers_of_the_host(draw: Callable[[torch.Generator], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'npu'"):
        draw(torch.Generator(DEVICE))


def test_shapes_are_drawn_with_any_generator() -> None:
    assert torch.rand(3, device="meta", generator=torch.Generator(DEVICE)).is_meta
    assert torch.randperm(5, device=DEVICE, generator=torch.Generator(DEVICE)).sum().item() == 10
