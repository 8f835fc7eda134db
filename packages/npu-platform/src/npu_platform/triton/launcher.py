"""Owns the launch of a compiled kernel: which argument is which word of 8 bytes; the launch itself is native."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from npu_platform import _C
from npu_platform.errors import HostTensorError, KernelLaunchError
from npu_platform.triton.build import load_library

_DESCRIPTOR = re.compile(r"tensordesc<([^[>]*)\[([^]]*)\]")
_LETTERS = {"fp32": "f", "f32": "f", "fp64": "d", "fp16": "e", "bf16": "b", "i1": "?", "u1": "?"}
"""Types of words, as ``csrc/triton_launcher.cpp`` knows them; beside them are addresses and integers."""

_BEFORE = 9  # what Triton passes before the kernel's arguments


def entry_of(content: bytes) -> tuple[ctypes.CDLL, int]:
    """Return a library and the address of its entry."""
    library = load_library(content)
    return library, ctypes.cast(library.npu_triton_launch, ctypes.c_void_p).value or 0


def launcher(src: Any, metadata: Any) -> Callable[..., None]:
    """Return what launches the kernels of one signature; Triton calls it with grid, device, entry, hooks, arguments.

    It does nothing for an empty grid, and raises KernelLaunchError where the device refused it, or a program failed.
    """
    del metadata
    kinds = list(src.signature.values())
    takers = [_taker(kind) for kind in kinds]
    letters = "".join(_letter(kind) for taker in takers for kind in taker.kinds)
    if any(isinstance(taker, _Tuple | _Descriptor) for taker in takers):
        launch = _native(letters, list(range(len(letters))), len(letters))
        return _Flattening(takers, launch)
    return _native(letters, [place for place, kind in enumerate(kinds) if kind != "constexpr"], len(kinds))


def _native(letters: str, places: list[int], arguments: int) -> Callable[..., None]:
    launch: Callable[..., None] = _C.triton_launcher(
        letters, places, arguments, torch.ops.npu.launch_table(), KernelLaunchError, HostTensorError
    )
    return launch


class _Flattening:
    """Launches a kernel with tuples or descriptors, each of which is several words."""

    def __init__(self, takers: list[_Taker], launch: Callable[..., None]) -> None:
        self._takers = takers
        self._launch = launch

    def __call__(self, *given: Any) -> None:
        taken = zip(self._takers, given[_BEFORE:], strict=True)
        self._launch(*given[:_BEFORE], *(word for taker, argument in taken for word in taker.take(argument)))


class _Argument:
    """A scalar or an address."""

    def __init__(self, kind: str) -> None:
        self.kinds = [kind]

    def take(self, value: Any) -> Iterator[Any]:
        yield value


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
        yield from [value.base, *sizes, *flags, *sizes]


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


def _letter(kind: str) -> str:
    return _LETTERS.get(kind) or ("*" if kind[0] == "*" else "u" if kind[0] == "u" else "i")
