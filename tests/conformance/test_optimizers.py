"""PyTorch's optimizer database on npu: each optimizer, in each of its implementations, takes the steps of the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db, optims
from torch.testing._internal.common_utils import TestCase
from torch.utils._pytree import tree_map

from tests.support.parity import as_on_cpu, attempt

STEPS = 4
SHAPES = ((4, 3), (3, 4), (5, 5))  # matrices: Muon takes nothing else
# Ways to take the same step; each rounds in its own places. The CPU has nothing capturable and takes the plain way there.
WAYS = ("plain", "foreach", "fused", "capturable")


class TestOptimizers(TestCase):
    @optims(optim_db, dtypes=[torch.float32, torch.float64, torch.bfloat16, torch.complex64])
    @as_on_cpu
    def test_steps(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> Iterator[Any]:
        if dtype.is_complex and not optim_info.supports_complex:
            return
        for config in optim_info.optim_inputs_func("cpu"):
            for way in (way for way in WAYS if has(optim_info, way)):
                if way == "capturable" and dtype == torch.bfloat16:
                    continue  # it rounds in other places than the plain way, the only one that the CPU has beside it
                keywords = copy.deepcopy(config.kwargs) | keywords_of(optim_info, way, device)
                # Capturable steps are counted in float32, and are as exact.
                kept = torch.float32 if way == "capturable" and dtype == torch.float64 else dtype
                yield attempt(lambda k=keywords, kept=kept: in_dtype(stepped(optim_info, k, device, dtype), kept))

    @optims(optim_db, dtypes=[torch.float32])
    @as_on_cpu
    def test_state_moves_with_the_optimizer(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> Iterator[Any]:
        for config in optim_info.optim_inputs_func("cpu")[:2]:
            yield attempt(lambda config=config: resumed(optim_info, copy.deepcopy(config.kwargs), device, dtype))


def has(optim_info: OptimizerInfo, way: str) -> bool:
    """Return whether an optimizer can be asked to step that way."""
    return (
        way == "plain" or way in optim_info.supported_impls or (way == "capturable" and optim_info.has_capturable_arg)
    )


def keywords_of(optim_info: OptimizerInfo, way: str, device: str) -> dict[str, bool]:
    """Return what chooses a way; by default a device may choose another than the CPU."""
    if way == "capturable" and device != "cpu":
        return {way: True}
    chosen = {"foreach": way == "foreach"} if "foreach" in optim_info.supported_impls else {}
    return chosen | ({"fused": True} if way == "fused" else {})


def stepped(optim_info: OptimizerInfo, keywords: dict[str, Any], device: str, dtype: torch.dtype) -> list[Any]:
    """Return the parameters, and what the optimizer keeps of them, after some steps."""
    parameters = parameters_on(device, dtype)
    optimizer = optim_info.optim_cls(parameters, **keywords)
    for step in range(STEPS):
        take_step(optim_info, optimizer, parameters, step)
    kept = [{k: v for k, v in optimizer.state[each].items() if k != "step"} for each in parameters]
    return [parameters, kept]


def in_dtype(values: Any, dtype: torch.dtype) -> Any:
    """Return values with their tensors in a dtype."""
    return tree_map(lambda leaf: leaf.detach().to(dtype) if isinstance(leaf, Tensor) else leaf, values)


def resumed(optim_info: OptimizerInfo, keywords: dict[str, Any], device: str, dtype: torch.dtype) -> list[Any]:
    """Return the parameters after steps by one optimizer, and then by another that loads the first one's state."""
    parameters = parameters_on(device, dtype)
    first = optim_info.optim_cls(parameters, **keywords)
    take_step(optim_info, first, parameters, 0)
    second = optim_info.optim_cls(parameters, **keywords)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_step(optim_info, second, parameters, 1)
    return parameters


def parameters_on(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the same parameters on any device."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [torch.nn.Parameter(each.to(dtype).to(device)) for each in drawn]


def take_step(optim_info: OptimizerInfo, optimizer: Optimizer, parameters: list[Tensor], step: int) -> None:
    """Take one step with gradients that depend on the parameters."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(((each - step) * (each - step).conj()).real.sum() for each in parameters)
        loss.backward()
        if optim_info.only_supports_sparse_grads:
            for each in parameters:
                each.grad = each.grad.to_sparse()
        return loss

    if optim_info.step_requires_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


instantiate_device_type_tests(TestOptimizers, globals(), only_for="npu")
