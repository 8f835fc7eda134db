"""Owns the operations that compute an element from elements: arithmetic, comparisons, conversions, functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton.codegen import masks
from npu_platform.triton.codegen.libdevice import c_function
from npu_platform.triton.codegen.values import DEAR, Index, Value
from npu_platform.triton.codegen.writer import Writer
from npu_platform.triton.ir.operations import Operation
from npu_platform.triton.ir.types import Type

Terms = Sequence[str]
CHEAP = 24
"""Integers of at most so many operations are computed again wherever they are used: addresses and masks."""


def _call(name: str) -> Callable[[Operation, Type, Terms], str]:
    """Write ``name<T>(a, b)`` with the type of the result; the function is in the headers of `runtime`."""
    return lambda _operation, kind, terms: f"{name}<{kind.c}>({', '.join(terms)})"


def _overloaded(name: str) -> Callable[[Operation, Type, Terms], str]:
    return lambda _operation, kind, terms: f"{kind.c}({name}({', '.join(terms)}))"


def _compare(prefix: str) -> Callable[[Operation, Type, Terms], str]:
    def write(operation: Operation, _kind: Type, terms: Terms) -> str:
        predicate = operation.words.split(",")[0].strip()
        return f"{prefix}{predicate}({', '.join(terms)})"

    return write


def _clamp(operation: Operation, kind: Type, terms: Terms) -> str:
    function = "clampf_nan" if "propagateNan = all" in operation.words else "clampf"
    return f"{function}<{kind.c}>({', '.join(terms)})"


def _convert(operation: Operation, kind: Type, terms: Terms) -> str:
    function = "convertf_rtz" if "rounding = rtz" in operation.words else "convertf"
    return f"{function}<{kind.c}>({terms[0]})"


def _bitcast(_operation: Operation, kind: Type, terms: Terms) -> str:
    return f"({kind.c})({terms[0]})" if kind.is_pointer else f"bits<{kind.c}>({terms[0]})"


def _extern(operation: Operation, kind: Type, terms: Terms) -> str:
    return f"{kind.c}({c_function(operation.attributes['symbol'])}({', '.join(terms)}))"


_SAME_TYPE = """
    addi subi muli andi ori xori shli shrui shrsi divsi remsi divui remui maxsi minsi maxui minui ceildivsi floordivsi
    addf subf mulf divf maxnumf minnumf maximumf minimumf negf select
"""
_CONVERSIONS = "extsi extui trunci sitofp uitofp fptosi fptoui"
_FUNCTIONS = """
    acos acosh asin asinh atan atanh cbrt cos cosh erf erfc exp exp2 expm1 log log10 log1p log2 sin sinh tan tanh
    floor ceil trunc round sqrt rsqrt atan2 copysign fma absi isnan isinf isfinite
"""
_RENAMED = {"absf": "fabs", "powf": "pow", "roundeven": "rint", "ctlz": "clz", "cttz": "ctz", "ctpop": "popc"}

WRITERS: dict[str, Callable[[Operation, Type, Terms], str]] = {
    **{f"arith.{name}": _call(name) for name in _SAME_TYPE.split()},
    **{f"arith.{name}": _call(name) for name in _CONVERSIONS.split()},
    **{f"math.{name}": _overloaded(f"m_{name}") for name in _FUNCTIONS.split()},
    **{f"math.{name}": _overloaded(f"m_{function}") for name, function in _RENAMED.items()},
    "arith.remf": _overloaded("m_fmod"),
    "arith.index_cast": _call("extsi"),
    "arith.index_castui": _call("extui"),
    "arith.extf": _call("convertf"),
    "arith.truncf": _convert,
    "tt.fp_to_fp": _convert,
    "arith.bitcast": _bitcast,
    "tt.bitcast": _bitcast,
    "tt.ptr_to_int": lambda _operation, kind, terms: f"{kind.c}(reinterpret_cast<intptr_t>({terms[0]}))",
    "tt.int_to_ptr": lambda _operation, kind, terms: f"reinterpret_cast<{kind.c}>(intptr_t({terms[0]}))",
    "arith.cmpi": _compare(""),
    "arith.cmpf": _compare("f_"),
    "tt.clampf": _clamp,
    "tt.mulhiui": _overloaded("mulhiui"),
    "tt.precise_divf": _call("divf"),
    "tt.precise_sqrt": _overloaded("m_sqrt"),
    "tt.extern_elementwise": _extern,
}
"""Operation's name -> its C++ expression, from the operation, the type of the result, and the operands' expressions."""

_SIGNED = {"arith.addi": "+", "arith.subi": "-", "arith.muli": "*"}
_CHEAP = {*_SIGNED, "arith.extsi", "arith.extui", "arith.trunci", "arith.cmpi", "arith.andi", "arith.ori", "arith.xori"}
_CHEAP |= {"arith.index_cast"}


def elementwise(writer: Writer, operation: Operation) -> None:
    """Write an operation of the table."""
    values, kind = writer.operands(operation), operation.result_types[0]
    write = _writer(writer, operation)

    def read(index: Index) -> str:
        return write(operation, kind, [writer.read(value, () if not value.type.shape else index) for value in values])

    name = operation.results[0]
    cost = 1 + sum(value.cost for value in values)
    if kind.shape and operation.name in _CHEAP and cost <= CHEAP:
        rising, falls = masks.rises(operation, values), masks.falls(writer, operation, values)
        writer.define_lazily(name, kind, read, values, cost, rising=rising, falls=falls)
    elif kind.is_pointer and kind.shape and operation.name in ("tt.bitcast", "arith.bitcast"):
        writer.define_lazily(name, kind, read, values, DEAR)
    else:
        writer.define(name, kind, read)


def extended_multiplication(writer: Writer, operation: Operation) -> None:
    """Write a product's lower and upper halves."""
    values, kind = writer.operands(operation), operation.result_types[0]
    upper = "mulhisi" if operation.name == "arith.mulsi_extended" else "mulhiui"
    for name, function in zip(operation.results, (f"muli<{kind.c}>", upper), strict=True):
        writer.define(name, kind, _product(writer, function, values))


def _product(writer: Writer, function: str, values: Sequence[Value]) -> Callable[[Index], str]:
    return lambda index: f"{function}({', '.join(writer.read(value, index) for value in values)})"


def inline_assembly(writer: Writer, operation: Operation) -> None:
    """Write what an instruction of another processor does, where the table knows it."""
    text = re.sub(r"[{}\s]+", " ", operation.strings[0]).strip()
    if not text or text.startswith("griddepcontrol."):
        return  # an order between kernels, which run one after the other
    if text not in _ASSEMBLY:
        msg = (
            f"A Triton kernel has inline assembly of a GPU that npu does not know: {text!r}. "
            "Use the Triton operation for it, or another kernel."
        )
        raise UnsupportedFeatureError(msg)
    values, kind = writer.operands(operation), operation.result_types[0]

    def read(index: Index) -> str:
        terms = [writer.read(value, index) for value in values]
        return _ASSEMBLY[text].format(*terms, T=kind.c)

    writer.define(operation.results[0], kind, read, None if values else "store")  # a clock is read in its turn


_ASSEMBLY = {
    "mov.u64 $0, %globaltimer;": "nanoseconds()",
    "mov.b32 $0, $1;": "bits<{T}>({0})",
    "cvt.rs.f16x2.f32 $0, $2, $1, $3;": "round_stochastically({0}, {1})",
    ".reg .b8 tmp; cvt.rn.satfinite.e2m1x2.f32 tmp, $1, $2; cvt.u32.u8 $0, tmp;": "{T}(pack_e2m1({0}, {1}))",
    ".reg .b8 t; .reg .b32 w; cvt.rn.satfinite.e2m1x2.f32 t, $2, $1; mov.b32 w, t, t, t, t ; and.b32 $0, w, 255;": (
        "{T}(pack_e2m1({1}, {0}))"
    ),
    "ex2.approx.f32 $0, $1;": "m_exp2({0})",
    "ex2.approx.ftz.f32 $0, $1;": "m_exp2({0})",
    "lg2.approx.f32 $0, $1;": "m_log2({0})",
    "lg2.approx.ftz.f32 $0, $1;": "m_log2({0})",
    "rcp.approx.f32 $0, $1;": "m_reciprocal({0})",
    "rcp.approx.ftz.f32 $0, $1;": "m_reciprocal({0})",
    "rsqrt.approx.f32 $0, $1;": "m_rsqrt({0})",
    "sqrt.approx.f32 $0, $1;": "m_sqrt({0})",
    "tanh.approx.f32 $0, $1;": "m_tanh({0})",
}
"""Instructions -> C++ of the operands' elements; of several elements in one register each is computed by itself."""


def _writer(writer: Writer, operation: Operation) -> Callable[[Operation, Type, Terms], str]:
    if operation.name in _SIGNED and id(operation) in writer.addresses and operation.result_types[0].element != "i1":
        sign = _SIGNED[operation.name]
        return lambda _operation, kind, terms: f"{kind.c}({terms[0]} {sign} {terms[1]})"
    return WRITERS[operation.name]


HANDLERS = {
    **dict.fromkeys(WRITERS, elementwise),
    "arith.mulsi_extended": extended_multiplication,
    "arith.mului_extended": extended_multiplication,
    "tt.elementwise_inline_asm": inline_assembly,
}
