"""Owns products of matrices: by the functions of `runtime/dot.h`, which keep a tile of the result in registers."""

from __future__ import annotations

import re

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton.codegen.values import Index, Storage, Value
from npu_platform.triton.codegen.writer import Writer
from npu_platform.triton.ir.operations import Operation
from npu_platform.triton.ir.types import Type

_SCALED = re.compile(r"lhs = (\w+) rhs = (\w+)")
_BF16_LANES = 16


def dot(writer: Writer, operation: Operation) -> None:
    """Write a product that is added to the third operand, in the precision of the result, at least float's."""
    left, right, sum_ = writer.operands(operation)
    writer.close()
    result, held = _accumulator(writer, sum_, operation.result_types[0])
    accumulated = held.type.element
    *_, inner, columns = right.type.shape
    by_pairs = {left.type.element, right.type.element} == {"bf16"} and columns % _BF16_LANES == 0 and inner % 2 == 0
    element = "bf16" if by_pairs and accumulated == "f32" else "i8" if accumulated == "i32" else accumulated
    _call(writer, held, (writer.array(left, element), writer.array(right, element)), left.type, right.type)
    _finish(writer, operation, result, held)


def dot_scaled(writer: Writer, operation: Operation) -> None:
    """Write a product of microscaled matrices: an exponent for each 32 elements of the inner dimension."""
    match = _SCALED.search(operation.words)
    assert match, operation.words
    names = operation.words.partition(" lhs")[0]
    parts = [re.findall(r"%[\w#-]+", part) for part in names.split(",")]
    left, right, (sum_,) = ([writer.values[name] for name in part] for part in parts)
    writer.close()
    result, held = _accumulator(writer, sum_, operation.result_types[0])
    packed = [operation.attributes.get(f"{side}_k_pack", "true") for side in ("lhs", "rhs")]
    if "false" in packed:
        msg = "tl.dot_scaled with numbers packed along another dimension than the inner one does not run on npu."
        raise UnsupportedFeatureError(msg)
    a = _scaled(writer, left, match[1], inner=1)
    b = _scaled(writer, right, match[2], inner=0)
    _call(writer, held, (a.name, b.name), a.type, b.type)
    _finish(writer, operation, result, held)


def _accumulator(writer: Writer, value: Value, kind: Type) -> tuple[Storage, Storage]:
    """Return the variable of the result and the one that sums, at least floats, begun with the third operand."""
    if kind.element in ("f32", "f64", "i32"):
        if (array := writer.overwrite(value)) is not None:
            return array, array
        result = writer.new_array(kind)
        writer.copy(result, value)
        writer.close()
        return result, result
    held = writer.new_array(kind.of("f32"))
    writer.copy(held, Value(held.type, lambda index: f"float({writer.read(value, index)})", value.sources))
    writer.close()
    return writer.new_array(kind), held


def _finish(writer: Writer, operation: Operation, result: Storage, held: Storage) -> None:
    if result is not held:
        rounded = writer.stored(held)
        writer.copy(result, Value(result.type, lambda index: f"{result.type.c}({writer.read(rounded, index)})"))
        writer.close()
    writer.define_stored(operation.results[0], result)


def _call(writer: Writer, held: Storage, names: tuple[str, str], left: Type, right: Type) -> None:
    *batch, rows, inner = left.shape
    columns = right.shape[-1]
    count = batch[0] if batch else 1
    writer.work += count * rows * inner * columns // 8
    sizes = rows * columns, rows * inner, inner * columns
    for number in range(count):
        at = [f"{name} + {number * size}" for name, size in zip((held.name, *names), sizes, strict=True)]
        writer.emit(f"dot<{rows}, {columns}, {inner}>({', '.join(at)});")


def _scaled(writer: Writer, operands: list[Value], form: str, inner: int) -> Storage:
    """Return the floats of a matrix whose elements have a form such as e2m1 and, maybe, scales."""
    value, *scale = operands
    shape = list(value.type.shape)
    if form == "e2m1":
        shape[inner] *= 2
    floats = writer.new_array(Type("f32", tuple(shape)))
    type_of = {"e4m3": "f8E4M3FN", "e5m2": "f8E5M2"}

    def read(index: Index) -> str:
        if form == "e2m1":
            place = index[inner]
            byte = tuple(f"({place}) / 2" if axis == inner else each for axis, each in enumerate(index))
            number = f"from_e2m1({writer.read(value, byte)} >> (({place}) % 2 * 4))"
        elif form in type_of and value.type.element == "i8":
            number = f"float(bits<{type_of[form]}>({writer.read(value, index)}))"
        else:
            number = f"float({writer.read(value, index)})"
        if not scale:
            return number
        # Scales lie by rows for both sides: [rows, inner / 32], [columns, inner / 32].
        block = f"({index[inner]}) / 32"
        return f"{number} * from_e8m0({writer.read(scale[0], (index[1 - inner], block))})"

    writer.copy(floats, Value(floats.type, read))
    writer.close()
    return floats


HANDLERS = {"tt.dot": dot, "tt.dot_scaled": dot_scaled}
