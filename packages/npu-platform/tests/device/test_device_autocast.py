"""Mixed precision on npu is that of torch.cuda: the same ops in half precision, the same ones in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

DEVICE = "npu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ops_are_cast_as_their_list_says(dtype: torch.dtype) -> None:
    x, image = torch.randn(4, 4, device=DEVICE), torch.randn(1, 2, 6, 6, device=DEVICE)
    target = torch.tensor([0, 1, 2, 3], device=DEVICE)
    with torch.autocast(DEVICE, dtype=dtype):
        half = x @ x
        lower = [
            half,
            F.linear(x, x),
            F.conv2d(image, torch.ones(3, 2, 2, 2, device=DEVICE)),
            torch.einsum("ij,jk", x, x),
            F.scaled_dot_product_attention(x[None], x[None], x[None]),
            torch.nn.LSTM(4, 4).to(DEVICE)(x[None])[0],
        ]
        full = [
            half.softmax(-1),
            half.exp(),
            F.layer_norm(half, (4,)),
            F.cross_entropy(half, target),
            half.sum(),
            half.norm(),
        ]
        kept = [half.relu(), x.relu()]
        widest = torch.cat([half, x])
    assert {result.dtype for result in lower} == {dtype}
    assert {result.dtype for result in full} == {torch.float32}
    assert [result.dtype for result in kept] == [dtype, torch.float32]
    assert widest.dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_weights_are_cast_once_and_get_their_gradient_in_float32() -> None:
    layer, x = torch.nn.Linear(4, 4, device=DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.autocast(DEVICE):
        before = torch.npu.launch_counts()[0]
        layer(x)
        first = torch.npu.launch_counts()[0] - before
        y = layer(x)
        assert torch.npu.launch_counts()[0] - before - first < first  # the second time the cast is there
        assert y.dtype == torch.get_autocast_dtype(DEVICE) == torch.float16
        y.float().square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_loss_that_overflows_in_half_precision_is_refused() -> None:
    x = torch.rand(3, device=DEVICE)
    with torch.autocast(DEVICE), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(x, x)


def test_dtype_without_half_precision_turns_autocast_off() -> None:
    with pytest.warns(UserWarning, match="only supports dtypes of torch.bfloat16, torch.float16"):
        context = torch.autocast(DEVICE, dtype=torch.float64)
    with context:
        assert F.linear(torch.ones(2, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)).dtype == torch.float32


def test_names_of_the_module_amp() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.npu.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.npu.amp.custom_bwd
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, 2, device=DEVICE, requires_grad=True)
    with torch.npu.amp.autocast(dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        doubled = Double.apply(x @ x)
    assert doubled.dtype == torch.float32
    assert torch.npu.amp.GradScaler(init_scale=4.0).scale(doubled.sum()).item() == 64


def test_scaler_skips_the_step_that_overflowed() -> None:
    model = torch.nn.Linear(4, 1, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=1)
    steps = []
    for overflow in (False, True, False):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast(DEVICE):
            loss = model(torch.ones(3, 4, device=DEVICE)).float().square().mean() + model.weight.sum()
        scaler.scale(loss).backward()
        if overflow:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        steps.append((scaler.get_scale(), not torch.equal(model.weight, before)))
    assert steps == [(16.0, True), (8.0, False), (16.0, True)]
