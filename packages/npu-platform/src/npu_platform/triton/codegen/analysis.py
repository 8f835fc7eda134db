"""Owns what is found out about a function before it is written: which integers are offsets, and how loops move them."""

from __future__ import annotations

from collections.abc import Iterator

from npu_platform.triton.ir.operations import Block, Function, Operation, Region

_OFFSET_ARITHMETIC = {"arith.addi", "arith.subi", "arith.muli", "arith.extsi"}
_PASSED_ON = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"}


def address_arithmetic(function: Function) -> set[int]:
    """Return the ids of the integer operations whose results end in an address.

    They are written with C++'s signed arithmetic, whose overflow is undefined: only so the compiler sees that
    neighbouring elements lie side by side. An address that overflowed would be none in Triton either.
    """
    readers = dict(_definitions_read(function.body, {}))
    found: set[int] = set()
    work = [
        definition
        for operation, definitions in readers.values()
        if operation.name == "tt.addptr"
        for definition in definitions[1:]
    ]
    while work:
        operation = work.pop()
        if operation is None or id(operation) in found or operation.name not in _OFFSET_ARITHMETIC | _PASSED_ON:
            continue
        found.add(id(operation))
        work += readers[id(operation)][1]
    return found


def _definitions_read(
    region: Region, known: dict[str, Operation]
) -> Iterator[tuple[int, tuple[Operation, list[Operation | None]]]]:
    """Yield each operation's id, itself, and what defines its operands; None: an argument."""
    for block in region:
        known = {name: each for name, each in known.items() if name not in dict(block.arguments)}
        for operation in block.operations:
            yield id(operation), (operation, [known.get(name) for name in operation.operands])
            for inner in operation.regions:
                yield from _definitions_read(inner, known)
            known.update(dict.fromkeys(operation.results, operation))


def steps(body: Block, argument: str, value: str) -> list[str] | None:
    """Return what a loop adds to a carried tensor in each step, or None where it does something else with it.

    What is added are names of tensors that have one value for all elements, by ``tt.splat`` or as a constant:
    a[i] + k, not a[i] + b[i].
    """
    definitions = {name: operation for operation in body.operations for name in operation.results}
    added: list[str] = []
    while value != argument:
        operation = definitions.get(value)
        if operation is None or operation.name not in ("tt.addptr", "arith.addi"):
            return None
        value, step = operation.operands
        added.append(step)
    return added
