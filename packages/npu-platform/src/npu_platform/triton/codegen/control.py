"""Owns what runs when: loops, conditions, branches, calls of functions, the end."""

from __future__ import annotations

import re
from collections.abc import Callable

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton.codegen.analysis import steps
from npu_platform.triton.codegen.values import DEAR, Index, Storage, Value
from npu_platform.triton.codegen.writer import Writer
from npu_platform.triton.ir.operations import Block, Function, Operation
from npu_platform.triton.ir.types import Type


def for_loop(writer: Writer, operation: Operation) -> None:
    """Write a counted loop; a carried tensor that all elements of which move alike is its first value and a number."""
    writer.close()
    lower, upper, step = (writer.scalar(value) for value in writer.operands(operation))
    (block,) = operation.regions[0]
    kind = Type(operation.attributes["type"])
    variable = writer.new_scalar(kind)
    returned = _returned(block)
    carried = [
        _carried(writer, block, argument, writer.values[first], after)
        for (argument, first), after in zip(operation.captures, returned, strict=True)
    ]
    for each in carried:
        each.begin()
    as_compared = kind.c.replace("int", "uint", 1) if operation.attributes["unsigned"] == "true" else kind.c
    writer.emit(
        f"for ({variable.name} = {lower}; {as_compared}({variable.name}) < {as_compared}({upper}); "
        f"{variable.name} += {step}) {{"
    )
    with writer.repeated():
        writer.define_stored(operation.attributes["variable"], variable)
        for (argument, _), each in zip(operation.captures, carried, strict=True):
            writer.values[argument] = each.value()
        writer.run(_without_end(block))
        results = [writer.values[name] for name in returned]
        kept = [(each, value) for each, value in zip(carried, results, strict=True) if isinstance(each, _InVariable)]
        writer.assign([each.storage for each, _ in kept], [value for _, value in kept])
        for each in carried:
            if isinstance(each, _Moved):
                each.move()
        writer.emit("}")
    for name, each in zip(operation.results, carried, strict=True):
        writer.values[name] = each.value()


def while_loop(writer: Writer, operation: Operation) -> None:
    """Write a loop that ends by a condition in its first region."""
    (before,), (after,) = operation.regions
    first = [writer.values[name] for _, name in operation.captures]
    carried = [writer.new(value.type) for value in first]
    writer.assign(carried, first)
    passed = [writer.new(kind) for _, kind in after.arguments]
    writer.emit("while (true) {")
    with writer.repeated():
        for (name, _), storage in zip(operation.captures, carried, strict=True):
            writer.define_stored(name, storage)
        writer.run(_without_end(before))
        condition, *values = before.operations[-1].operands
        text = writer.scalar(writer.values[condition])
        writer.assign(passed, [writer.values[name] for name in values])
        writer.emit(f"if (!({text})) break;")
        for (name, _), storage in zip(after.arguments, passed, strict=True):
            writer.define_stored(name, storage)
        writer.run(_without_end(after))
        writer.assign(carried, [writer.values[name] for name in _returned(after)])
        writer.emit("}")
    for name, storage in zip(operation.results, passed, strict=True):
        writer.define_stored(name, storage)


def condition(writer: Writer, operation: Operation) -> None:
    """Write an if with or without an else; both give the values that it results in."""
    test = writer.scalar(writer.operands(operation)[0])
    results = [writer.new(kind) for kind in operation.result_types]
    writer.emit(f"if ({test}) {{")
    for number, (block,) in enumerate(operation.regions):
        if number:
            writer.emit("} else {")
        writer.run(_without_end(block))
        writer.assign(results, [writer.values[name] for name in _returned(block)])
    writer.emit("}")
    for name, storage in zip(operation.results, results, strict=True):
        writer.define_stored(name, storage)


def branch(writer: Writer, operation: Operation) -> None:
    """Write a jump, or two by a condition, with the values of the block's arguments."""
    writer.close()
    if operation.name == "cf.cond_br":
        writer.emit(f"if ({writer.scalar(writer.operands(operation)[0])}) {{")
        _jump(writer, *operation.successors[0])
        writer.emit("}")
    _jump(writer, *operation.successors[-1])


def _jump(writer: Writer, label: str, names: list[str]) -> None:
    writer.assign(writer.blocks[label], [writer.values[name] for name in names])
    writer.emit(f"goto {label};")


def call(writer: Writer, operation: Operation) -> None:
    """Write the call of a function of the module."""
    name = operation.words[operation.words.index("@") + 1 : operation.words.index("(")]
    if operation.strings:  # a name with other characters is in quotes
        name = operation.strings[0]
    terms = [writer.array(value) if value.type.shape else writer.scalar(value) for value in writer.operands(operation)]
    results = [writer.new(kind) for kind in operation.result_types]
    writer.emit(f"{function_name(name)}({', '.join(['program', *terms, *(each.name for each in results)])});")
    for result, storage in zip(operation.results, results, strict=True):
        writer.define_stored(result, storage)


def leave(writer: Writer, operation: Operation) -> None:
    """Write the end of a function, with its results."""
    values = writer.operands(operation)
    if values and writer.function.is_kernel:
        msg = f"The Triton kernel {writer.function.name} returns a value, which nobody gets: store it."
        raise UnsupportedFeatureError(msg)
    for number, value in enumerate(values):
        kind = value.type
        if kind.shape:
            name = writer.array(value)
            writer.emit(f"for (int i = 0; i < {kind.numel}; i++) result{number}[i] = {name}[i];")
        else:
            writer.emit(f"result{number} = {writer.scalar(value)};")
    writer.emit("return;")


def function_name(name: str) -> str:
    """Return the C++ name of a function of the module."""
    return "f_" + re.sub(r"\W", "_", name)


def function_head(function: Function) -> str:
    """Return the declaration of a function: the program, the arguments, and references for the results."""
    arguments = [
        f"const {kind.c}* argument{number}" if kind.shape else f"{kind.c} argument{number}"
        for number, (_, kind) in enumerate(function.arguments)
    ]
    results = [
        f"{kind.c}* result{number}" if kind.shape else f"{kind.c}& result{number}"
        for number, kind in enumerate(function.result_types)
    ]
    return f"static void {function_name(function.name)}({', '.join(['const Program& program', *arguments, *results])})"


def _without_end(block: Block) -> Block:
    ends = ("scf.yield", "scf.condition")
    return Block(block.label, block.arguments, [each for each in block.operations if each.name not in ends])


def _returned(block: Block) -> list[str]:
    """Return the names that a region gives; one that gives nothing has no last operation for it."""
    ended = block.operations[-1] if block.operations else None
    return ended.operands if ended is not None and ended.name == "scf.yield" else []


class _InVariable:
    """A carried value that lies in a variable, overwritten in each step."""

    def __init__(self, writer: Writer, first: Value) -> None:
        self.writer, self.first = writer, first
        self.storage: Storage = writer.new(first.type)

    def begin(self) -> None:
        self.writer.assign([self.storage], [self.first])

    def value(self) -> Value:
        return self.writer.stored(self.storage)


class _Moved:
    """A carried tensor of addresses or integers, all of which move alike: the first value and how far it has moved."""

    def __init__(self, writer: Writer, first: Value, added: list[Value]) -> None:
        self.writer, self.first, self.added = writer, first, added
        self.moved = writer.new_scalar(Type("i64" if first.type.is_pointer else first.type.element))

    def begin(self) -> None:
        self.writer.emit(f"{self.moved.name} = 0;")

    def value(self) -> Value:
        kind, writer = self.first.type, self.writer

        def read(index: Index) -> str:
            text = writer.read(self.first, index)
            moved = f"({text} + {self.moved.name})"  # signed, as all offsets
            return moved if kind.is_pointer else f"{kind.c}{moved}"

        sources = self.first.sources | {self.moved}
        return Value(kind, read, sources, min(DEAR, 1 + self.first.cost))

    def move(self) -> None:
        for value in self.added:
            step = self.writer.read(value, ("0",) * len(value.type.shape))
            self.writer.emit(f"{self.moved.name} = {self.moved.type.c}({self.moved.name} + {step});")


def _carried(writer: Writer, block: Block, argument: str, first: Value, after: str) -> _InVariable | _Moved:
    if first.type.shape and (first.type.is_pointer or first.type.element in ("i32", "i64")):
        added = _uniform_steps(writer, block, argument, after)
        if added is not None:
            return _Moved(writer, first, added)
    return _InVariable(writer, first)


def _uniform_steps(writer: Writer, block: Block, argument: str, after: str) -> list[Value] | None:
    """Return what is added in each step, where it is known before the loop and has one value for all elements."""
    names = steps(block, argument, after)
    inside = {name for operation in block.operations for name in operation.results}
    if names is None or any(name in inside or not writer.values[name].uniform for name in names):
        return None
    return [writer.values[name] for name in names]


HANDLERS: dict[str, Callable[[Writer, Operation], None]] = {
    "scf.for": for_loop,
    "scf.while": while_loop,
    "scf.if": condition,
    "cf.br": branch,
    "cf.cond_br": branch,
    "tt.call": call,
    "tt.return": leave,
}
