"""Owns masks such as ``offsets < n``, which let the first elements of a row through and no others: loops without them.

A vector instruction with a mask is slow on some processors even if the mask leaves nothing out (on Zen 5 a kernel that
doubles a vector is a third faster without), and very slow where it leaves out addresses that must not be touched. So a
loop is written once for masks that leave nothing out, and once in three parts: without masks, with them, and where all
of them are false.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from npu_platform.triton.codegen.values import Falling, Index, Loop, Value, first
from npu_platform.triton.ir.operations import Operation

if TYPE_CHECKING:
    from npu_platform.triton.codegen.writer import Writer

MASKED = 128
"""Elements; a loop of fewer is not worth a second one."""
_LONG, _TOGETHER, _FEWER = 256, 64, 16
"""The parts of a row of so many elements begin at multiples of the next number, those of a shorter one of the last."""


def rises(operation: Operation, values: Sequence[Value]) -> bool:
    """Return whether integers rise because the operands do; in a difference one of them is the same everywhere."""
    if operation.name == "arith.subi" and not values[1].uniform:
        return False
    kept = ("arith.addi", "arith.subi", "arith.extsi", "arith.index_cast")
    return operation.name in kept and all(value.rising or value.uniform for value in values)


def falls(writer: Writer, operation: Operation, values: Sequence[Value]) -> Callable[[Index], Falling] | None:
    """Return what tells where a mask begins to be false, if it compares numbers that rise, or joins such masks.

    Such a number has overflowed if it is below the first one: a tensor has 2^20 elements at most, so that its ranges
    span less than half of what an integer holds.
    """
    if operation.name == "arith.andi":
        left, right = (value.falls for value in values)
        if left is None or right is None:
            return None
        return lambda index: _both(left(index), right(index))
    predicate = operation.words.split(",")[0].strip()
    if operation.name != "arith.cmpi" or predicate not in ("slt", "sle"):
        return None
    rising, limit = values
    if not (rising.rising and limit.uniform):
        return None

    def at(index: Index) -> Falling:
        begin, here = (writer.read(rising, place) for place in (first(rising.type.shape), index))
        return Falling(f"{begin} <= {here}", f"{predicate}({here}, {writer.read(limit, index)})")

    return at


def _both(left: Falling, right: Falling) -> Falling:
    return Falling(f"{left.exact} && {right.exact}", f"{left.true} && {right.true}")


def with_and_without(loop: Loop, hint: Sequence[str], body: Sequence[str]) -> list[str]:
    """Return the text of a loop with this body, in which a mask is read as ``all0`` and ``some0``, or ``all1`` ..."""
    *outer, head = loop.head or ["for (int once = 0; once < 1; once++)"]
    plain = [*outer, *hint, head, *body]
    if not loop.masks:
        return plain
    exact = " && ".join(end.exact for end, _ in loop.masks)
    everywhere = " && ".join(end.true for end, _ in loop.masks)
    lines = [
        f"const bool exact = {exact};",
        f"if (exact && {everywhere}) {{",
        *_constants(loop, "true", "true"),
        *plain,
    ]
    return ["{", *lines, "} else {", *_in_parts(loop, hint, body), "}", "}"]


def _in_parts(loop: Loop, hint: Sequence[str], body: Sequence[str]) -> list[str]:
    """Return a loop whose rows begin with what all masks let through and end with what none does."""
    *outer, head = loop.head
    if loop.inner is None or loop.inner[1] < MASKED:
        return [*_constants(loop, "false", "true"), *outer, *hint, head, *body]
    variable, size = loop.inner
    multiple = _TOGETHER if size >= _LONG else _FEWER
    search = f"exact ? true_until<{size}, {multiple}>([&](int {variable}) {{ return"
    each = [f"({here.true})" for _, here in loop.masks]

    def part(constants: list[str], begin: str, end: str) -> list[str]:
        return ["{", *constants, *hint, f"for (int {variable} = {begin}; {variable} < {end}; {variable}++)", *body, "}"]

    return [
        *outer,
        "{",
        f"const int whole = {search} {' && '.join(each)}; }}) : 0;",
        f"const int rest = {search} {' || '.join(each)}; }}) + {multiple} : {size};",
        *part(_constants(loop, "true", "true"), "0", "whole"),
        *part(_constants(loop, "false", "true"), "whole", f"(rest < {size} ? rest : {size})"),
        *part(_constants(loop, "false", "false"), "rest", str(size)),
        "}",
    ]


def _constants(loop: Loop, all_true: str, some_true: str) -> list[str]:
    numbers = loop.masks.values()
    return [f"constexpr bool all{number} = {all_true}, some{number} = {some_true};" for number in numbers]
