"""Owns the C++ of a whole module: the headers that it needs, its functions, and how the kernel is launched."""

from __future__ import annotations

import re
from collections.abc import Sequence

from npu_platform.triton.codegen import control, diagnostics, dot, elementwise, memory, reductions, views
from npu_platform.triton.codegen.analysis import address_arithmetic
from npu_platform.triton.codegen.writer import Plan, Writer
from npu_platform.triton.ir.operations import Function, walk
from npu_platform.triton.ir.text import parse_module

HANDLERS = {
    **views.HANDLERS,
    **elementwise.HANDLERS,
    **memory.HANDLERS,
    **reductions.HANDLERS,
    **dot.HANDLERS,
    **control.HANDLERS,
    **diagnostics.HANDLERS,
}
"""Operation of TTIR -> what writes it. What is not here is refused by its name."""

_WORTH_A_THREAD = 20_000
"""Elements; another thread takes some microseconds to come."""


def generate(ttir: str) -> str:
    """Return the C++ of a module of TTIR, whose first public function is the kernel.

    Raises UnsupportedFeatureError for operations and types that mean nothing on a host.
    """
    functions = parse_module(ttir)
    kernel = next(function for function in functions if function.is_kernel)
    heads = [f"{control.function_head(function)};" for function in functions if function is not kernel]
    bodies = [_device_function(function) for function in functions if function is not kernel]
    return "\n".join([*_includes(functions, ttir), "using namespace npu_triton;", *heads, *bodies, _kernel(kernel), ""])


def _includes(functions: Sequence[Function], ttir: str) -> list[str]:
    names = {operation.name for function in functions for operation in walk(function.body)}
    headers = ["arithmetic.h", "mathematics.h", "launch.h"]
    if any(name.startswith("tt.atomic") for name in names):
        headers.append("atomics.h")
    if names & {"tt.assert", "tt.print"}:
        headers.append("diagnostics.h")
    if names & {"tt.dot", "tt.dot_scaled"}:
        headers.append("dot.h")
    with_bf16 = re.search(r"tt\.dot .*xbf16>", ttir) is not None  # its header is long: others do without
    return [*(["#define NPU_DOT_OF_BF16"] if with_bf16 else []), *(f'#include "{header}"' for header in headers)]


def _kernel(function: Function) -> str:
    body, arena, work = _body(function)
    arguments = [
        f"const auto argument{number} = argument<{kind.c}>(arguments[{number}]);"
        for number, (_, kind) in enumerate(function.arguments)
    ]
    grain = max(1, _WORTH_A_THREAD // max(1, work))
    lines = [
        "static void kernel(const Program& program, const int64_t* arguments, char* arena) {",
        *arguments,
        *body,
        "}",
        'extern "C" __attribute__((visibility("default"))) const char* npu_triton_launch(',
        "    const npu_launch_table* table, int device, int x, int y, int z, const void* arguments) {",
        f"  return Launch<{len(arguments)}, {grain}, {arena}, kernel>::submit(",
        f'      table, device, "triton::{function.name}", x, y, z, arguments);',
        "}",
    ]
    return "\n".join(lines)


def _device_function(function: Function) -> str:
    body, arena, _ = _body(function)
    own = [f"Arena own({arena});", "char* const arena = own.data;"] if arena else []
    return "\n".join([f"{control.function_head(function)} {{", *own, *body, "}"])


def _body(function: Function) -> tuple[list[str], int, int]:
    """Return the statements of a function, the bytes that it needs of an arena, and a measure of its work."""
    first = _written(function, None)
    second = _written(function, first.found)
    declared, arena = second.declarations()
    return [*declared, *second.lines], arena, second.work


def _written(function: Function, plan: Plan | None) -> Writer:
    writer = Writer(function, HANDLERS, address_arithmetic(function), plan)
    for number, (name, kind) in enumerate(function.arguments):
        writer.define_argument(name, kind, f"argument{number}")
    for block in function.body[1:]:
        writer.blocks[block.label] = [writer.new(kind) for _, kind in block.arguments]
    for number, block in enumerate(function.body):
        if number:
            writer.emit(f"{block.label}: ;")
            for (name, _), storage in zip(block.arguments, writer.blocks[block.label], strict=True):
                writer.define_stored(name, storage)
        writer.run(block)
        writer.close()
    return writer
