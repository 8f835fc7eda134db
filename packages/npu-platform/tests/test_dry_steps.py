"""A step without products gives what its layers would if the weights were zeros, and runs none of their kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from vllm.config import CompilationMode

from npu_platform import compat
from npu_platform.v2.dry_steps import without_products

DEVICE = "npu"


def numbers_that_are_none(rows: int, columns: int) -> None:
    """Leave memory of that size with NaNs behind, which the next tensor of it gets."""
    torch.full((rows, columns), float("nan"), device=DEVICE)


@torch.inference_mode()
def test_layers_of_pytorch_give_zeros() -> None:
    x, weight = torch.ones(3, 64, device=DEVICE), torch.ones(32, 64, device=DEVICE)
    step = without_products(lambda x: linear(x, weight) + x[:, :32])
    numbers_that_are_none(3, 32)
    assert torch.equal(step(x), torch.ones(3, 32, device=DEVICE))
    assert torch.equal(linear(x, weight), torch.full((3, 32), 64.0, device=DEVICE))


@torch.inference_mode()
@pytest.mark.usefixtures("npu_ops")
def test_layers_of_npu_ops_give_zeros() -> None:
    x, weight = torch.ones(3, 64, device=DEVICE), torch.ones(32, 64, device=DEVICE)
    step = without_products(lambda x: torch.ops.npu_ops.linear(x, weight, None) - x[:, :32])
    numbers_that_are_none(3, 32)
    assert torch.equal(step(x), torch.full((3, 32), -1.0, device=DEVICE))
    assert torch.equal(torch.ops.npu_ops.linear(x, weight, None), torch.full((3, 32), 64.0, device=DEVICE))


@torch.inference_mode()
def test_no_weight_is_read() -> None:
    """A product with it would be no number."""
    weight = torch.full((8, 8), float("nan"), device=DEVICE)
    step = without_products(lambda x: linear(linear(x, weight), weight))
    assert torch.equal(step(torch.ones(2, 8, device=DEVICE)), torch.zeros(2, 8, device=DEVICE))


@pytest.mark.parametrize(
    ("mode", "product"), [(CompilationMode.NONE, 0.0), (CompilationMode.VLLM_COMPILE, 16.0)], ids=["eager", "compiled"]
)
def test_the_warm_up_of_an_eager_model_has_none(
    monkeypatch: pytest.MonkeyPatch, mode: CompilationMode, product: float
) -> None:
    """Its sampler has the logits of a product: they are like those of requests."""
    from vllm.v1.worker.gpu import warmup

    x, weight, seen = torch.ones(1, 16, device=DEVICE), torch.ones(1, 16, device=DEVICE), []

    def warm(_runner: Any, execute: Any, sample: Any) -> None:
        seen.extend([execute(None), sample(None)])

    monkeypatch.setattr(warmup, "warmup_kernels", warm)
    runner = SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))

    def step(_output: Any) -> float:
        return linear(x, weight).item()

    compat._warm_up_with_two_requests(runner, step, step)
    assert seen == [product, 16.0]
