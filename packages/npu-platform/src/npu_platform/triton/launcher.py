"""Owns the launch of a compiled kernel: its arguments in words of 8 bytes, then one call into the library."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from npu_platform.errors import KernelLaunchError
from npu_platform.triton.build import load_library

_DESCRIPTOR = re.compile(r"tensordesc<([^[>]*)\[([^]]*)\]")
_FORMATS = {
    "fp32": "f4x",
    "f32": "f4x",
    "fp64": "d",
    "fp16": "e6x",
    "bf16": "H6x",
    "i1": "?7x",
    "u1": "?7x",
}


def entry_of(content: bytes) -> tuple[ctypes.CDLL, Callable[..., bytes | None]]:
    """Return a library and its entry: (device, x, y, z, arguments) -> the error, or None."""
    library = load_library(content)
    function = library.npu_triton_launch
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
    table = torch.ops.npu.launch_table()

    def launch(device: int, x: int, y: int, z: int, words: bytes) -> bytes | None:
        return function(table, device, x, y, z, words)

    return library, launch


class Launcher:
    """Launches the kernels of one signature.

    Args:
        src: what was compiled, with its signature.
        metadata: of the compiled kernel.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        del metadata
        kinds = list(src.signature.values())
        self._takers = [_taker(kind) for kind in kinds]
        self._is_plain = all(isinstance(kind, str) and not kind.startswith("tensordesc") for kind in kinds)
        flat = [kind for taker in self._takers for kind in taker.kinds]
        self._pack = struct.Struct("<" + "".join(_format(kind) for kind in flat)).pack
        self._places = [(place, kind[0] == "*") for place, kind in enumerate(kinds) if kind != "constexpr"]
        self._bf16 = [place for place, kind in enumerate(flat) if kind == "bf16"]

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: Callable[..., bytes | None],
        kernel_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable[[Any], None] | None,
        exit_hook: Callable[[Any], None] | None,
        *arguments: Any,
    ) -> None:
        """Launch the kernel for a grid; nothing happens for an empty one.

        Raises:
            KernelLaunchError: the device refused it, or a program failed.
        """
        del kernel_metadata
        if x * y * z <= 0:
            return
        words = self._words(arguments)
        for place in self._bf16:  # which `struct` does not know
            words[place] = _bf16_code(words[place])
        if enter_hook is not None:
            enter_hook(launch_metadata)
        error = function(stream, x, y, z, self._pack(*words))
        if error is not None:
            raise KernelLaunchError(error.decode())
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _words(self, arguments: tuple[Any, ...]) -> list[Any]:
        if self._is_plain:
            return [_address(arguments[place]) if points else arguments[place] for place, points in self._places]
        taken = zip(self._takers, arguments, strict=True)
        return [word for taker, argument in taken for word in taker.take(argument)]


class _Argument:
    """A scalar or an address."""

    def __init__(self, kind: str) -> None:
        self.kinds = [kind]

    def take(self, value: Any) -> Iterator[Any]:
        yield _address(value) if self.kinds[0][0] == "*" else value


class _Constant:
    """An argument that was compiled in."""

    kinds: tuple[str, ...] = ()

    def take(self, _value: Any) -> Iterator[Any]:
        return iter(())


class _Tuple:
    """Several arguments in one."""

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self.takers = [_taker(kind) for kind in kinds]
        self.kinds = [kind for taker in self.takers for kind in taker.kinds]

    def take(self, value: Any) -> Iterator[Any]:
        for taker, each in zip(self.takers, value, strict=True):
            yield from taker.take(each)


class _Descriptor:
    """A tensor descriptor made by the host: address, sizes and strides, then flags, then sizes and strides again.

    That is what Triton's pass makes of it (``add_rewrite_tensor_descriptor_to_pointer``); before 3.7 with one flag.
    """

    def __init__(self, dtype: str, rank: int) -> None:
        self.flags = 2 if _has_two_flags() else 1
        self.kinds = ["*" + dtype, *["i64"] * (2 * rank), *["i1"] * self.flags, *["i32"] * rank, *["i64"] * rank]

    def take(self, value: Any) -> Iterator[Any]:
        flags = [value.padding == "nan", getattr(value, "round_f32_to_tf32", False)][: self.flags]
        sizes = [*value.shape, *value.strides]
        yield from [value.base.data_ptr(), *sizes, *flags, *sizes]


_Taker = _Argument | _Constant | _Tuple | _Descriptor


def _taker(kind: Any) -> _Taker:
    if isinstance(kind, tuple):
        return _Tuple(kind)
    if match := _DESCRIPTOR.match(kind):
        return _Descriptor(match[1], match[2].count(",") + 1)
    return _Constant() if kind == "constexpr" else _Argument(kind)


def _has_two_flags() -> bool:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__


def _address(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        if value.is_cpu and not value.is_pinned():
            msg = "A Triton kernel on npu got a tensor of the host: move it to npu, or pin its memory."
            raise KernelLaunchError(msg)
        return value.data_ptr()
    if value is None or isinstance(value, int):
        return value or 0
    return value.data_ptr()  # such as Triton's own TensorWrapper


def _format(kind: str) -> str:
    return _FORMATS.get(kind, "Q" if kind[0] in "*u" else "q")


def _bf16_code(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.uint16).item())
