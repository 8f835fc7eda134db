"""What a test observes of a device, and that npu shows what the CPU shows in the same run.

A body is a generator function of a device: it runs on the CPU first and on npu then, and yields what it observes. What
the CPU cannot do does not count.
"""

from __future__ import annotations

import functools
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Body = Callable[..., Iterator[Any]]

SEED = 1234


@dataclass(frozen=True)
class Raised:
    """An exception in the place of an observation."""

    kind: str
    message: str


@dataclass(frozen=True)
class Seen:
    """What is observed of a tensor: its values on the host, and how it lies in memory."""

    values: Tensor
    facts: tuple


@dataclass(frozen=True)
class Unseen:
    """Of a tensor with undefined values: how it lies in memory."""

    facts: tuple


def as_on_cpu(body: Body) -> Callable[..., None]:
    """Make the test of a body: npu shows what the CPU shows; skipped where the CPU shows nothing but errors."""

    @functools.wraps(body)
    def test(self: unittest.TestCase, device: str, **parameters: Any) -> None:
        try:
            expected = observe(body, self, "cpu", parameters)
        except unittest.SkipTest:
            raise
        except Exception as error:
            if "unexpected keyword argument" in str(error):  # the test's own mistake, which would skip every case
                raise
            msg = f"the CPU fails too: {type(error).__name__}: {str(error)[:200]}"
            raise unittest.SkipTest(msg) from error
        if not expected:
            msg = "nothing to observe: the database has no such sample"
            raise unittest.SkipTest(msg)
        if all(isinstance(leaf, Raised) for leaf in tree_leaves(expected)):
            msg = f"the CPU fails too: {expected[0]}"
            raise unittest.SkipTest(msg)
        compare(observe(body, self, device, parameters), expected)

    return test


def observe(body: Body, case: unittest.TestCase, device: str, parameters: dict[str, Any]) -> list[Any]:
    """Return what the body yields on a device, with its tensors brought to the host."""
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(body(case, device, **parameters))


def attempt(function: Callable[[], Any]) -> Any:
    """Return what the function returns, observed, or the exception that it raises."""
    torch.manual_seed(SEED)
    try:
        return see(function())
    except unittest.SkipTest:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the CPU raises
        return Raised(type(error).__name__, str(error)[:500])


def see(value: Any) -> Any:
    """Return `value` with its tensors observed."""
    return tree_map(lambda leaf: seen(leaf) if isinstance(leaf, Tensor) else _plain(leaf), value)


def seen(tensor: Tensor) -> Seen:
    """Observe a tensor."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return Seen(tensor.cpu().dequantize(), facts_of(tensor))
    if tensor.layout is not torch.strided:
        return Seen(tensor.to_dense().cpu(), facts_of(tensor))
    return Seen(tensor.resolve_conj().resolve_neg().cpu(), facts_of(tensor))


def without_values(value: Any) -> Any:
    """Return an observation without the values of its tensors, which are undefined."""
    return tree_map(lambda leaf: Unseen(leaf.facts) if isinstance(leaf, Seen) else leaf, value)


def facts_of(tensor: Tensor) -> tuple:
    """Return how a tensor lies in memory."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    place = (tensor.stride(), tensor.storage_offset()) if strided else ()
    return (tensor.dtype, tensor.layout, tuple(tensor.shape), *place, tensor.is_conj(), tensor.is_neg())


def shares_memory(result: Any, inputs: Any) -> list[bool]:
    """Return for each tensor of a result whether it lies on the storage of an input."""
    return [any(_storage(x) == _storage(y) for y in _strided(inputs)) for x in _strided(result) if x.numel()]


def devices_of(result: Any, device: str) -> list[bool]:
    """Return for each tensor of a result whether it is on the device under test."""
    return [leaf.device.type == torch.device(device).type for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def compare(actual: list[Any], expected: list[Any]) -> None:
    """Raise AssertionError where an observation differs from the CPU's; what the CPU cannot do does not count."""
    if len(actual) != len(expected):
        msg = f"npu shows {len(actual)} things, the CPU {len(expected)}{_first_raised(actual)}"
        raise AssertionError(msg)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        _compare_one(one, other, index)


def _first_raised(observations: list[Any]) -> str:
    raised = (leaf for leaf in tree_leaves(observations) if isinstance(leaf, Raised))
    return next((f"; it raises {error.kind}: {error.message}" for error in raised), "")


def _compare_one(actual: Any, expected: Any, index: int) -> None:
    if isinstance(expected, Raised):
        return
    assert not isinstance(actual, Raised), f"observation {index}: npu raises {actual.kind}: {actual.message}"
    _compare_leaves(tree_leaves(actual), tree_leaves(expected), index)


def _compare_leaves(actual: list[Any], expected: list[Any], index: int) -> None:
    assert len(actual) == len(expected), f"observation {index}: npu shows {actual}, the CPU {expected}"
    for one, other in zip(actual, expected, strict=True):
        if isinstance(other, (Seen, Unseen)):
            assert isinstance(one, type(other)), f"observation {index}: npu shows {one}, the CPU a tensor"
            assert one.facts == other.facts, (
                f"observation {index}: npu's tensor is {one.facts}, the CPU's {other.facts}"
            )
        if isinstance(other, Seen):
            torch.testing.assert_close(
                one.values, other.values, equal_nan=True, msg=lambda text: f"observation {index}: {text}"
            )
        elif isinstance(other, float):
            torch.testing.assert_close(one, other, equal_nan=True)
        elif not isinstance(other, Unseen):
            assert one == other, f"observation {index}: npu shows {one!r}, the CPU {other!r}"


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return "device"
    known = (bool, int, float, complex, str, torch.dtype, torch.layout, Raised, Seen, Unseen, type(None))
    return leaf if isinstance(leaf, known) else type(leaf).__name__


def _strided(value: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
