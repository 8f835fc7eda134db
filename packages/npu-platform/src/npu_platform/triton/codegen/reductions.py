"""Owns the operations with a region for two elements: reductions, scans, and functions of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from npu_platform.triton.codegen.values import named
from npu_platform.triton.codegen.writer import Writer
from npu_platform.triton.ir.operations import Operation
from npu_platform.triton.ir.types import Type

_LANES = 64
"""Partial results of a reduction: four vectors of AVX-512, so that one sum need not wait for the one before."""


def reduce(writer: Writer, operation: Operation) -> None:
    """Combine the elements along an axis: lanes beside each other first, then halves of the lanes."""
    values, axis = writer.operands(operation), operation.integer("axis")
    shape = values[0].type.shape
    size, inner, outer = shape[axis], math.prod(shape[axis + 1 :]), math.prod(shape[:axis])
    sources = [writer.array(value) for value in values]
    together = min(size, max(1, _LANES // inner))
    lanes = together * inner
    partial = [writer.new_array(Type(value.type.element, (lanes,))).name for value in values]
    results = [writer.new(kind) for kind in operation.result_types]
    row = size * inner

    writer.emit(f"for (int o = 0; o < {outer}; o++) {{")
    copies = " ".join(f"{p}[l] = {s}[o * {row} + l];" for p, s in zip(partial, sources, strict=True))
    writer.emit(f'_Pragma("GCC ivdep") for (int l = 0; l < {lanes}; l++) {{ {copies} }}')
    into = [f"{name}[l]" for name in partial]
    if together < size:
        writer.emit(f"for (int k = {lanes}; k < {row}; k += {lanes})")
        more = [f"{source}[o * {row} + k + l]" for source in sources]
        _combine_in_loop(writer, operation, f"for (int l = 0; l < {lanes}; l++)", into, more)
    if together > 1:
        writer.emit(f"for (int half = {lanes // 2}; half >= {inner}; half /= 2)")
        _combine_in_loop(
            writer, operation, "for (int l = 0; l < half; l++)", into, [f"{name}[l + half]" for name in partial]
        )
    for name, result in zip(partial, results, strict=True):
        if result.type.shape:
            writer.emit(f"for (int l = 0; l < {inner}; l++) {result.name}[o * {inner} + l] = {name}[l];")
        else:
            writer.emit(f"{result.name} = {name}[0];")
    writer.emit("}")
    writer.work += outer * row
    for name, result in zip(operation.results, results, strict=True):
        writer.define_stored(name, result)


def scan(writer: Writer, operation: Operation) -> None:
    """Combine each element with all before it along an axis, or with all behind it."""
    values, axis = writer.operands(operation), operation.integer("axis")
    shape = values[0].type.shape
    size, inner, outer = shape[axis], math.prod(shape[axis + 1 :]), math.prod(shape[:axis])
    results = [writer.new_array(kind) for kind in operation.result_types]
    writer.assign(results, values)
    backwards = operation.attributes.get("reverse", "false").startswith("true")
    begin, neighbour = (size - 2, 1) if backwards else (1, -1)
    steps = f"k = {begin}; k >= 0; k--" if backwards else f"k = {begin}; k < {size}; k++"
    writer.emit(f"for (int o = 0; o < {outer}; o++) for (int {steps})")
    place = f"(o * {size} + k) * {inner} + l"
    before = [f"{result.name}[{place} + {neighbour * inner}]" for result in results]
    here = [f"{result.name}[{place}]" for result in results]
    _combine_in_loop(writer, operation, f"for (int l = 0; l < {inner}; l++)", before, here, into=here)
    writer.work += outer * size * inner
    for name, result in zip(operation.results, results, strict=True):
        writer.define_stored(name, result)


def map_elementwise(writer: Writer, operation: Operation) -> None:
    """Write a function of elements, of which it may take and give several neighbours at a time."""
    values, pack = writer.operands(operation), operation.integer("pack")
    sources = [writer.array(value) for value in values]
    results = [writer.new_array(kind) for kind in operation.result_types]
    writer.emit(f"for (int l = 0; l < {values[0].type.numel}; l += {pack})")
    terms = [f"{source}[l + {number}]" for source in sources for number in range(pack)]
    into = [f"{result.name}[l + {number}]" for result in results for number in range(pack)]
    _write_region(writer, operation, terms, into)
    for name, result in zip(operation.results, results, strict=True):
        writer.define_stored(name, result)


def _combine_in_loop(
    writer: Writer,
    operation: Operation,
    loop: str,
    left: Sequence[str],
    right: Sequence[str],
    into: Sequence[str] | None = None,
) -> None:
    writer.emit(f'_Pragma("GCC ivdep") {loop}')
    _write_region(writer, operation, [*left, *right], left if into is None else into)


def _write_region(writer: Writer, operation: Operation, terms: Sequence[str], into: Sequence[str]) -> None:
    """Write the operations of a region for the elements that `terms` are, and what it returns into `into`."""
    (block,) = operation.regions[0]
    with writer.inline() as lines:
        lines.append("{")
        for number, ((name, kind), term) in enumerate(zip(block.arguments, terms, strict=True)):
            lines.append(f"{kind.c} const e{number} = {term};")
            writer.values[name] = named(kind, f"e{number}")
        *body, returned = block.operations
        writer.run(type(block)(block.label, [], body))
        texts = [writer.scalar(writer.values[name]) for name in returned.operands]
        lines += [f"const auto r{number} = {text};" for number, text in enumerate(texts)]
        lines += [f"{target} = r{number};" for number, target in enumerate(into)]
        lines.append("}")
        written = list(lines)
    writer.lines += written


HANDLERS = {"tt.reduce": reduce, "tt.scan": scan, "tt.map_elementwise": map_elementwise}
