"""Owns the random numbers of the devices: seeds and states of their default generators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_platform import _C

from .devices import Device, device_count, index_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def manual_seed(seed: int) -> None:
    """Seed the current device; the numbers are those of the CPU generator with the same seed."""
    _C.default_generator(_C.current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices, those included that come up later."""
    _C.seed_all(int(seed) % 2**64)


def seed() -> int:
    """Seed the current device from the operating system and return the seed."""
    return _C.default_generator(_C.current_device()).seed()


def seed_all() -> int:
    """Seed all devices alike from the operating system and return the seed."""
    chosen = torch.Generator().seed()
    manual_seed_all(chosen)
    return chosen


def initial_seed() -> int:
    """Return the seed of the current device."""
    return _C.default_generator(_C.current_device()).initial_seed()


def get_rng_state(device: Device = "npu") -> Tensor:
    """Return the state of a device's generator, a uint8 tensor on the CPU."""
    return _C.default_generator(index_of(device)).get_state()


def get_rng_state_all() -> list[Tensor]:
    """Return the states of all devices' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: Tensor, device: Device = "npu") -> None:
    """Set the state of a device's generator."""
    _C.default_generator(index_of(device)).set_state(new_state)


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Set the states of all devices' generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def __getattr__(name: str) -> tuple[torch.Generator, ...]:
    """``default_generators``, made when asked for: importing brings up no device."""
    if name == "default_generators":
        return tuple(_C.default_generator(index) for index in range(device_count()))
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
