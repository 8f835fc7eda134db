"""Owns the types of TTIR: scalars, pointers, and tensors of either."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from npu_platform.errors import UnsupportedFeatureError

_C_TYPES = {
    "i1": "bool",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "index": "int64_t",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "float",
    "f64": "double",
    "f8E4M3FN": "f8E4M3FN",
    "f8E5M2": "f8E5M2",
    "f8E4M3FNUZ": "f8E4M3FNUZ",
    "f8E5M2FNUZ": "f8E5M2FNUZ",
}
_POINTER = re.compile(r"!tt\.ptr<(.*?)(?:, \d+)?>$")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(.*?)(?:, #[\w#]+)?>$")


@dataclass(frozen=True, slots=True)
class Type:
    """The type of a value: its element, as TTIR spells it, and the shape of a tensor; a scalar has none."""

    element: str
    shape: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def is_pointer(self) -> bool:
        """Whether the elements are addresses."""
        return self.element.startswith("!tt.ptr")

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers of any width."""
        return self.element[0] in "fb"

    @property
    def pointee(self) -> str:
        """The element that the pointers point to."""
        match = _POINTER.match(self.element)
        assert match, f"{self.element} is no pointer"
        return match[1]

    @property
    def c(self) -> str:
        """The C++ type of an element."""
        return c_type(self.element)

    def of(self, element: str) -> Type:
        """Return the type of the same shape with other elements."""
        return Type(element, self.shape)


@functools.cache
def c_type(element: str) -> str:
    """Return the C++ type of an element; raise UnsupportedFeatureError for one that kernels on npu do not know."""
    if match := _POINTER.match(element):
        return c_type(match[1]) + "*"
    if element not in _C_TYPES:
        msg = f"Triton kernels on npu have no numbers of type {element}: use one of {', '.join(_C_TYPES)}."
        raise UnsupportedFeatureError(msg)
    return _C_TYPES[element]


@functools.cache
def parse_type(text: str) -> Type:
    """Read a type, such as ``tensor<16x64x!tt.ptr<f32>>``."""
    text = text.strip()
    if match := _TENSOR.match(text):
        return Type(match[2], tuple(int(size) for size in match[1].split("x") if size))
    return Type(text)


def strides(shape: tuple[int, ...]) -> list[int]:
    """Return the elements from one index to the next, a dimension each, of a tensor that lies row by row."""
    return [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
