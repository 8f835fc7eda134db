"""Owns how an op is defined once: schema, reference, meta function; torch then offers it as `torch.ops.npu_ops.<name>`.

The reference is registered for every device (CompositeExplicitAutograd). Native kernels, registered by the library
for CPU
and npu, take precedence there; a kernel of one's own goes on top by `torch.library.impl("npu_ops::<name>",
"PrivateUse1")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_LIBRARY = torch.library.Library("npu_ops", "FRAGMENT")

OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Op:
    """One op: its name, its schema (without namespace), what it computes in plain torch, and its result's shape."""

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the kernel that torch chooses for the arguments' device."""
        return getattr(torch.ops.npu_ops, self.name)(*args)


def define(schema: str, fake: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Op]:
    """Decorate a reference function to make it an op.

    schema: torch's schema language, e.g. `silu_and_mul(Tensor x) -> Tensor`.
    fake: computes an empty result of the right shape from fake tensors; None for ops that only write their arguments.
    """

    def decorate(reference: Callable[..., Any]) -> Op:
        name = schema.split("(", 1)[0]
        op = Op(name, schema, reference, fake or _writes_arguments_only)
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"npu_ops::{name}", op.fake, lib=_LIBRARY)
        OPS[name] = op
        return op

    return decorate


def _writes_arguments_only(*_: Any) -> None:
    return None
