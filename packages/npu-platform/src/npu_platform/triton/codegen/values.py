"""Owns what a name of TTIR stands for in C++: an expression of an element's index, with or without memory behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from npu_platform.triton.ir.types import Type, strides

Index = tuple[str, ...]
"""C++ expressions of an element's place, one a dimension; empty for a scalar."""

DEAR = 100
"""The cost of an expression that reads memory: it is not computed again wherever it is used."""


class LoopMustCloseError(Exception):
    """An element of another place of a value is wanted that the open loop is still computing."""


@dataclass(eq=False, slots=True)
class Storage:
    """A variable of the generated function: a scalar, or an array that has all elements of a tensor."""

    number: int
    """Of a storage or value within its function; the same in both passes."""
    name: str
    type: Type
    slot: int = -1
    """Of an array: which piece of the function's memory it has."""


@dataclass(frozen=True, slots=True)
class Falling:
    """C++ conditions at an index of a mask."""

    exact: str
    """No number before has overflowed: if that holds at the last element, the mask falls everywhere."""
    true: str
    """The mask is true there, and before."""


@dataclass(eq=False, slots=True)
class Value:
    """What an operation has defined.

    `read` gives the C++ expression of an element; `cost` says how much it computes; `sources` are the variables that it
    reads, so that they are not overwritten before it is used.
    """

    type: Type
    read: Callable[[Index], str]
    sources: frozenset[Storage] = frozenset()
    cost: int = 0
    array: Storage | None = None
    """The array that holds the elements one after the other, where there is one."""
    number: int = -1
    """Of a value with an array; see :class:`Storage`."""
    uniform: bool = False
    """Whether all elements are known to be the same."""
    rising: bool = False
    """Whether elements never become smaller along a dimension, but for an overflow: a sum of ranges and scalars."""
    falls: Callable[[Index], Falling] | None = None
    """Of a mask that is false behind an element, in every dimension, for which it is false: gives what is so there."""


@dataclass(eq=False, slots=True)
class Loop:
    """Loops over all elements of a shape, into which element-wise operations of that shape are put one by one."""

    shape: tuple[int, ...]
    index: Index
    linear: str
    """The element's place in an array of this shape."""
    head: list[str]
    born: int
    body: list[str] = field(default_factory=list)
    values: list[LoopValue] = field(default_factory=list)
    loads: bool = False
    stores: bool = False
    gathered: set[Storage] = field(default_factory=set)
    """Arrays of which other elements than this one are read."""
    masks: dict[tuple[Falling, Falling], int] = field(default_factory=dict)
    """Masks that fall, at their last element and at the loop's index -> their numbers."""
    inner: tuple[str, int] | None = None
    """The last dimension's variable and size, where the innermost loop is over that alone."""


@dataclass(eq=False, slots=True)
class LoopValue(Value):
    """A tensor that a loop computes: a local variable inside, an array outside if anybody reads it there."""

    loop: Loop | None = None
    local: str = ""


_NESTED = 8  # a loop of fewer steps than this is not worth an instruction of vectors


def make_loop(shape: tuple[int, ...], born: int) -> Loop:
    """Return the loops over a shape: one a dimension, or one over all elements where the last dimension is short."""
    long = [dimension for dimension, size in enumerate(shape) if size > 1]
    if len(long) <= 1 or (len(long) <= 3 and shape[long[-1]] >= _NESTED):
        index = tuple(f"i{dimension}" if dimension in long else "0" for dimension in range(len(shape)))
        head = [f"for (int i{dimension} = 0; i{dimension} < {shape[dimension]}; i{dimension}++)" for dimension in long]
        inner = (f"i{long[-1]}", shape[long[-1]]) if long else None
        return Loop(shape, index, linear(shape, index), head, born, inner=inner)
    index = split_linear(shape, "i")
    return Loop(shape, index, "i", [f"for (unsigned i = 0; i < {math.prod(shape)}; i++)"], born)


def first(shape: tuple[int, ...]) -> Index:
    """Return the index of a tensor's first element."""
    return ("0",) * len(shape)


def last(shape: tuple[int, ...]) -> Index:
    """Return the index of a tensor's last element."""
    return tuple(str(size - 1) for size in shape)


def named(kind: Type, variable: str) -> Value:
    """Return the value of a scalar that does not change."""
    return Value(kind, lambda _index: variable)


def linear(shape: tuple[int, ...], index: Index) -> str:
    """Return the place of an element in an array that lies row by row."""
    terms = [
        place if stride == 1 else f"({place}) * {stride}"
        for place, stride in zip(index, strides(shape), strict=True)
        if place != "0"
    ]
    return " + ".join(terms) or "0"


def split_linear(shape: tuple[int, ...], place: str) -> Index:
    """Return the index of the element at a place of an array that lies row by row."""
    index, first = [], True
    for size, stride in zip(shape, strides(shape), strict=True):
        if size == 1:
            index.append("0")
            continue
        divided = place if stride == 1 else f"({place}) / {stride}"
        index.append(divided if first else f"({divided}) % {size}")
        first = False
    return tuple(index)


def sources_of(values: Iterable[Value]) -> frozenset[Storage]:
    """Return the variables that any of the values reads."""
    return frozenset(source for value in values for source in value.sources)
