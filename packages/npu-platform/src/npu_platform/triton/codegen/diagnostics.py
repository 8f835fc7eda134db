"""Owns what a kernel says: assertions, which fail the launch, printed values, and what it lets the compiler assume."""

from __future__ import annotations

import re

from npu_platform.triton.codegen.values import Index, Value
from npu_platform.triton.codegen.writer import Writer
from npu_platform.triton.ir.operations import Operation


def assertion(writer: Writer, operation: Operation) -> None:
    """Write a check of all elements; the message is Triton's."""
    (condition,) = writer.operands(operation)
    message = c_string(operation.strings[0])
    writer.close()
    writer.statement(
        condition.type.shape,
        lambda index: f"if (!({writer.read(condition, index)})) fail(program, {message});",
        "store",
    )
    writer.close()


def assume(_writer: Writer, _operation: Operation) -> None:
    """Write nothing: what is assumed would make no loop faster, and nothing faster is worth a wrong assumption."""


def print_values(writer: Writer, operation: Operation) -> None:
    """Write the printing of a line an element, with the program and the element's place, as Triton does on GPUs.

    No other program's line comes between, and all is there at once: a process may end as forks do, without C's buffers.
    """
    writer.emit("flockfile(stdout);")
    prefix = c_string(operation.strings[0].replace("%", "%%"))
    values = writer.operands(operation)
    as_hex = operation.attributes.get("hex", "false")
    signed = re.findall(r"[01]", operation.attributes.get("isSigned", "").partition(":")[2])
    if not values:
        writer.emit(f'{_PROGRAM} printf({prefix}); printf("\\n");')
    for number, value in enumerate(values):
        is_signed = "false" if number < len(signed) and signed[number] == "0" else "true"
        which = f' printf("(operand {number}) ");' if len(values) > 1 else ""
        _print_elements(writer, value, f"printf({prefix});{which}", f"{as_hex}, {is_signed}, sizeof({value.type.c})")
    writer.emit("fflush(stdout); funlockfile(stdout);")


_PROGRAM = 'printf("pid (%d, %d, %d) ", program.x, program.y, program.z);'


def _print_elements(writer: Writer, value: Value, prefix: str, form: str) -> None:
    kind = value.type
    as_printed = "const void*" if kind.is_pointer else "double" if kind.is_float else "long long"

    def write(index: Index) -> str:
        widths = ", ".join(f"%{len(str(size - 1))}d" for size in kind.shape)
        places = "".join(f", int({place})" for place in index)
        place = f'printf("idx ({widths})"{places});'
        return f"{_PROGRAM} {place} {prefix} print_value(({as_printed})({writer.read(value, index)}), {form});"

    writer.statement(kind.shape, write, "store")
    writer.close(in_order=True)


def c_string(text: str) -> str:
    """Return a C++ literal of a text."""
    escaped = "".join(
        character
        if character.isprintable() and character not in '"\\' and character.isascii()
        else "".join(f"\\{byte:03o}" for byte in character.encode())
        for character in text
    )
    return f'"{escaped}"'


HANDLERS = {"tt.assert": assertion, "tt.print": print_values, "llvm.intr.assume": assume}
