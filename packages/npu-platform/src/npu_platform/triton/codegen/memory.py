"""Owns device memory: loads, stores, atomic operations, and elements that other elements choose."""

from __future__ import annotations

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton.codegen.values import Index, Value
from npu_platform.triton.codegen.writer import Writer
from npu_platform.triton.ir.operations import Operation
from npu_platform.triton.ir.types import c_type

_ATOMICS = {"add", "fadd", "and", "or", "xor", "exch", "max", "min", "umax", "umin"}


def load(writer: Writer, operation: Operation) -> None:
    """Write a load; an element whose mask is false is the third operand, or zero, and its address is not touched."""
    pointer, *rest = writer.operands(operation)
    kind = operation.result_types[0]

    def read(index: Index) -> str:
        address = writer.read(pointer, index)
        if not rest:
            return f"*{address}"
        other = writer.read(rest[1], index) if len(rest) > 1 else f"{kind.c}()"
        return f"{writer.read_mask(rest[0], index)} ? *{address} : {other}"

    writer.define(operation.results[0], kind, read, "load")


def store(writer: Writer, operation: Operation) -> None:
    """Write a store of the elements whose mask is true."""
    pointer, value, *mask = writer.operands(operation)

    def write(index: Index) -> str:
        condition = f"if ({writer.read_mask(mask[0], index)}) " if mask else ""
        return f"{condition}*{writer.read(pointer, index)} = {writer.read(value, index)};"

    writer.statement(pointer.type.shape, write, "store")


def atomic_rmw(writer: Writer, operation: Operation) -> None:
    """Write an atomic read-modify-write; its result is what was there before."""
    kind = operation.words.split(",")[0].strip()
    if kind not in _ATOMICS:
        msg = f"Triton's atomic operation {kind} does not run on npu: use one of {', '.join(sorted(_ATOMICS))}."
        raise UnsupportedFeatureError(msg)
    pointer, value, *mask = writer.operands(operation)
    function = "fadd" if kind == "add" and value.type.is_float else kind
    _atomic(writer, operation, pointer, [value], mask, f"atomic_{function}")


def atomic_cas(writer: Writer, operation: Operation) -> None:
    """Write an atomic compare-and-swap; its result is what was there before."""
    pointer, *values = writer.operands(operation)
    _atomic(writer, operation, pointer, values, [], "atomic_cas")


def _atomic(
    writer: Writer, operation: Operation, pointer: Value, values: list[Value], mask: list[Value], function: str
) -> None:
    kind = operation.result_types[0]

    def read(index: Index) -> str:
        terms = ", ".join(writer.read(each, index) for each in (pointer, *values))
        call = f"{function}<{kind.c}>({terms})"
        return f"{writer.read(mask[0], index)} ? {call} : {kind.c}()" if mask else call

    writer.close()
    writer.define(operation.results[0], kind, read, "store")
    writer.close(in_order=True)


def gather(writer: Writer, operation: Operation) -> None:
    """Write the elements of a tensor at the places that another tensor holds, along an axis."""
    source, places = writer.operands(operation)
    axis = operation.integer("axis")

    def read(index: Index) -> str:
        return writer.read(source, (*index[:axis], writer.read(places, index), *index[axis + 1 :]))

    writer.define(operation.results[0], operation.result_types[0], read)


def histogram(writer: Writer, operation: Operation) -> None:
    """Write how often each number below the number of bins occurs."""
    value, *mask = writer.operands(operation)
    kind = operation.result_types[0]
    bins = writer.new_array(kind)
    unsigned = c_type(value.type.element).replace("int", "uint", 1)
    writer.statement(kind.shape, lambda index: f"{bins.name}[{index[0]}] = 0;")
    writer.close()

    def count(index: Index) -> str:
        inside = f"{unsigned}({writer.read(value, index)}) < {kind.numel}"
        condition = f"{writer.read(mask[0], index)} && {inside}" if mask else inside
        return f"if ({condition}) {bins.name}[{writer.read(value, index)}]++;"

    writer.statement(value.type.shape, count, "store")
    writer.close(in_order=True)
    writer.define_stored(operation.results[0], bins)


def barrier(writer: Writer, _operation: Operation) -> None:
    """End the open loop: all lanes are here before any goes on."""
    writer.close()


HANDLERS = {
    "tt.load": load,
    "tt.store": store,
    "tt.atomic_rmw": atomic_rmw,
    "tt.atomic_cas": atomic_cas,
    "tt.gather": gather,
    "tt.histogram": histogram,
    "ttg.barrier": barrier,
    "gpu.barrier": barrier,
}
