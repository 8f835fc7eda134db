"""How the operators of PyTorch's database are sampled and called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_map

SAMPLES = 4
# Their values are whatever memory held, or a device's own random numbers.
UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "exponential"}

# A tensor of sections must lie on the CPU, on every device.
HOST_ARGUMENTS = {"tensor_split"}


def samples(
    op: OpInfo, device: str, dtype: torch.dtype, *, differentiable: bool = False, most: int = SAMPLES
) -> Iterator[SampleInput]:
    """Return the operator's first samples, drawn on the CPU and moved to a device."""
    drawn = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
    return moved(itertools.islice(drawn, most), device, op)


def moved(drawn: Iterable[SampleInput], device: str, op: OpInfo) -> Iterator[SampleInput]:
    """Yield copies of samples on a device: the same values, laid out the same in memory, views on a common storage.

    Copies on the CPU too: samples may share tensors that an operator writes.
    """
    for sample in drawn:
        storages: dict[int, torch.UntypedStorage] = {}

        def move(leaf: Any, storages: dict[int, torch.UntypedStorage] = storages) -> Any:
            if isinstance(leaf, torch.Tensor):
                return moved_tensor(leaf, device, storages).requires_grad_(leaf.requires_grad)
            named = isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu")
            return torch.device(device) if named else leaf

        first = tree_map(move, sample.input)
        args, kwargs = (
            (sample.args, sample.kwargs) if op.name in HOST_ARGUMENTS else tree_map(move, (sample.args, sample.kwargs))
        )
        yield SampleInput(first, args=args, kwargs=kwargs, output_process_fn_grad=sample.output_process_fn_grad)


def moved_tensor(tensor: torch.Tensor, device: str, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return a tensor's whole storage on a device, seen as the tensor sees it."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return tensor.to(device)
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        octets = torch.empty(0, dtype=torch.uint8).set_(storage)
        storages[storage._cdata] = octets.to(device, copy=True).untyped_storage()
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    result = torch.empty(0, dtype=tensor.dtype, device=device).set_(storages[storage._cdata], *place)
    result = result.conj() if tensor.is_conj() else result
    return torch._neg_view(result) if tensor.is_neg() else result


def differentiable(op: OpInfo, dtype: torch.dtype) -> bool:
    """Return whether the operator has a backward for a dtype on the CPU."""
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def call(function: Callable[..., Any], sample: SampleInput) -> Any:
    """Call an operator, or a variant of it, on a sample."""
    return function(sample.input, *sample.args, **sample.kwargs)
