"""Owns the operations that move elements and compute none: constants, ranges, shapes. They take no memory."""

from __future__ import annotations

import re
from collections.abc import Callable

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton.codegen.values import DEAR, Falling, Index, Storage, Value, linear, split_linear
from npu_platform.triton.codegen.writer import Writer
from npu_platform.triton.ir.operations import Operation
from npu_platform.triton.ir.types import Type

_BITS = {"f64": "uint64_t", "f32": "uint32_t", "f16": "uint16_t", "bf16": "uint16_t"}


def constant(writer: Writer, operation: Operation) -> None:
    """Write a number, or a tensor that has it everywhere."""
    kind = operation.result_types[0]
    words = operation.words.strip()
    if words.startswith("dense<["):
        msg = "A constant tensor of several values does not run on npu: load it from memory."
        raise UnsupportedFeatureError(msg)
    text = literal(words.removeprefix("dense<").removesuffix(">"), kind)
    writer.define_lazily(operation.results[0], kind, lambda _index: text, (), 0, uniform=True)


def literal(number: str, kind: Type) -> str:
    """Return a number of TTIR in C++: a decimal one, or the bits of a floating-point one in hexadecimal digits."""
    if number in ("true", "false"):
        return number
    if not kind.is_float:
        smallest = "(-9223372036854775807LL - 1)" if number == "-9223372036854775808" else f"{number}LL"
        return f"{kind.c}({smallest})"
    if number.startswith("0x"):
        return f"bits<{kind.c}>({_BITS.get(kind.element, 'uint8_t')}({number}ull))"
    return f"{kind.c}({number})" if kind.element == "f64" else f"{kind.c}({number}f)"


def poison(writer: Writer, operation: Operation) -> None:
    """Write a value that nobody may read."""
    kind = operation.result_types[0]
    writer.define_lazily(operation.results[0], kind, lambda _index: f"{kind.c}()", (), 0)


def program_id(writer: Writer, operation: Operation) -> None:
    """Write the number of this program in a dimension of the grid."""
    axis = operation.words.strip()
    writer.define_lazily(operation.results[0], Type("i32"), lambda _index: f"program.{axis}", (), 0)


def num_programs(writer: Writer, operation: Operation) -> None:
    """Write the size of the grid in a dimension."""
    axis = operation.words.strip()
    writer.define_lazily(operation.results[0], Type("i32"), lambda _index: f"program.size_{axis}", (), 0)


def make_range(writer: Writer, operation: Operation) -> None:
    """Write the numbers from start to end."""
    start = operation.integer("start")
    shift = f"int32_t({{}} + {start})" if start else "int32_t({})"
    writer.define_lazily(
        operation.results[0],
        operation.result_types[0],
        lambda index: shift.format(index[0]),
        (),
        0 if not start else 1,
        rising=True,
    )


def _view(move: Callable[[Operation, Value, Type, Index], Index]) -> Callable[[Writer, Operation], None]:
    """Return the handler of an operation whose elements are those of its operand at another index."""

    def handle(writer: Writer, operation: Operation) -> None:
        value, kind = writer.operands(operation)[0], operation.result_types[0]
        falls = value.falls
        writer.define_lazily(
            operation.results[0],
            kind,
            lambda index: writer.read(value, move(operation, value, kind, index)),
            (value,),
            value.cost,
            rising=value.rising,
            falls=None if falls is None else lambda index: falls(move(operation, value, kind, index)),
        )

    return handle


def _expand_dims(operation: Operation, _value: Value, _kind: Type, index: Index) -> Index:
    axis = operation.integer("axis")
    return index[:axis] + index[axis + 1 :]


def _broadcast(_operation: Operation, value: Value, _kind: Type, index: Index) -> Index:
    return tuple("0" if size == 1 else place for size, place in zip(value.type.shape, index, strict=True))


def _reshape(_operation: Operation, value: Value, kind: Type, index: Index) -> Index:
    if value.type.shape == kind.shape:
        return index
    kept = [size for size in kind.shape if size > 1]
    if kept == [size for size in value.type.shape if size > 1]:
        places = iter([place for place, size in zip(index, kind.shape, strict=True) if size > 1])
        return tuple(next(places) if size > 1 else "0" for size in value.type.shape)
    return split_linear(value.type.shape, linear(kind.shape, index))


def _transpose(operation: Operation, value: Value, _kind: Type, index: Index) -> Index:
    order = [int(number) for number in re.findall(r"\d+", operation.attributes["order"].partition(":")[2])]
    return tuple(index[order.index(dimension)] for dimension in range(len(value.type.shape)))


def splat(writer: Writer, operation: Operation) -> None:
    """Write a scalar for all elements."""
    (value,) = writer.operands(operation)
    place = ("0",) * len(value.type.shape)
    kind = operation.result_types[0]

    def read(_index: Index) -> str:
        return writer.read(value, place)

    falls = (lambda index: Falling("true", read(index))) if kind.element == "i1" else None
    writer.define_lazily(operation.results[0], kind, read, (value,), value.cost, uniform=True, falls=falls)


def unsplat(writer: Writer, operation: Operation) -> None:
    """Write the only element of a tensor as a scalar; TTIR's text names the tensor's type alone."""
    writer.close()
    (value,) = writer.operands(operation)
    place = ("0",) * len(value.type.shape)
    writer.define(operation.results[0], Type(value.type.element), lambda _index: writer.read(value, place))


def reshape(writer: Writer, operation: Operation) -> None:
    """Write the elements in another shape; where they lie in an array, that array is it."""
    value, kind = writer.operands(operation)[0], operation.result_types[0]

    def read(index: Index) -> str:
        if value.array is not None and value.type.shape != kind.shape:
            flat = Value(Type(kind.element, (kind.numel,)), value.read, array=value.array, number=value.number)
            return writer.read(flat, (linear(kind.shape, index),))
        return writer.read(value, _reshape(operation, value, kind, index))

    writer.define_lazily(operation.results[0], kind, read, (value,), value.cost)


def addptr(writer: Writer, operation: Operation) -> None:
    """Write an address and an offset, counted in elements."""
    values, kind = writer.operands(operation), operation.result_types[0]

    def read(index: Index) -> str:
        base, offset = (writer.read(value, index) for value in values)
        return f"({base} + {offset})"

    if kind.shape:
        writer.define_lazily(operation.results[0], kind, read, values, 1 + sum(value.cost for value in values))
    else:
        writer.define(operation.results[0], kind, read)


def join(writer: Writer, operation: Operation) -> None:
    """Write two tensors side by side in a new last dimension."""
    first, second = writer.operands(operation)

    def read(index: Index) -> str:
        return f"({index[-1]} ? {writer.read(second, index[:-1])} : {writer.read(first, index[:-1])})"

    writer.define_lazily(operation.results[0], operation.result_types[0], read, (first, second), DEAR)


def split(writer: Writer, operation: Operation) -> None:
    """Write the two halves of a tensor whose last dimension is of two."""
    (value,) = writer.operands(operation)
    for half, (name, kind) in enumerate(zip(operation.results, operation.result_types, strict=True)):
        writer.define_lazily(name, kind, _half(writer, value, str(half)), (value,), value.cost)


def _half(writer: Writer, value: Value, half: str) -> Callable[[Index], str]:
    return lambda index: writer.read(value, (*index, half))


def cat(writer: Writer, operation: Operation) -> None:
    """Write one tensor behind another; their order is Triton's to choose, and is kept."""
    begin, storage = 0, writer.new_array(operation.result_types[0])
    for value in writer.operands(operation):
        writer.statement(value.type.shape, _placed(writer, value, storage, begin))
        begin += value.type.numel
    writer.close()
    writer.define_stored(operation.results[0], storage)


def _placed(writer: Writer, value: Value, storage: Storage, begin: int) -> Callable[[Index], str]:
    return lambda index: f"{storage.name}[{begin} + {index[0]}] = {writer.read(value, index)};"


HANDLERS: dict[str, Callable[[Writer, Operation], None]] = {
    "arith.constant": constant,
    "ub.poison": poison,
    "tt.get_program_id": program_id,
    "tt.get_num_programs": num_programs,
    "tt.make_range": make_range,
    "tt.splat": splat,
    "tt.unsplat": unsplat,
    "tt.expand_dims": _view(_expand_dims),
    "tt.broadcast": _view(_broadcast),
    "tt.reshape": reshape,
    "tt.trans": _view(_transpose),
    "tt.addptr": addptr,
    "tt.join": join,
    "tt.split": split,
    "tt.cat": cat,
}
