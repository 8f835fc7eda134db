"""Owns the typed form of TTIR: functions of blocks of operations, which may hold regions of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from npu_platform.triton.ir.types import Type


@dataclass(slots=True)
class Operation:
    """One operation: what it is called, reads and defines."""

    name: str
    """With its dialect: ``arith.addi``."""
    results: list[str] = field(default_factory=list)
    """The names that it defines: ``%7``, or ``%7#0`` and ``%7#1``."""
    operands: list[str] = field(default_factory=list)
    """The names that it reads, in the order of the text."""
    result_types: list[Type] = field(default_factory=list)
    words: str = ""
    """What else stands between name and types: a predicate, a literal, a symbol."""
    attributes: dict[str, str] = field(default_factory=dict)
    """From braces: ``axis`` -> ``0 : i32``; a string is without its quotes."""
    strings: list[str] = field(default_factory=list)
    """Quoted words outside the braces."""
    regions: list[Region] = field(default_factory=list)
    captures: list[tuple[str, str]] = field(default_factory=list)
    """Of loops: argument of the body -> its first value."""
    successors: list[tuple[str, list[str]]] = field(default_factory=list)
    """Of branches: label -> the values of its block's arguments."""

    def integer(self, attribute: str) -> int:
        """Return the value of an attribute such as ``axis = 0 : i32``."""
        return int(self.attributes[attribute].split(":")[0])


@dataclass(slots=True)
class Block:
    """Operations that run one after the other."""

    label: str = ""
    arguments: list[tuple[str, Type]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


Region = list[Block]


@dataclass(slots=True)
class Function:
    """A kernel, or a function that a kernel calls."""

    name: str
    is_kernel: bool
    arguments: list[tuple[str, Type]]
    result_types: list[Type]
    body: Region


def walk(region: Region) -> Iterator[Operation]:
    """Yield the operations of a region and of all regions within, in the order of the text."""
    for block in region:
        for operation in block.operations:
            yield operation
            for inner in operation.regions:
                yield from walk(inner)
