"""Modules of PyTorch on the device: what moves there stays the module that it was, and padded batches are encoded."""

from __future__ import annotations

import pytest
import torch

DEVICE = "npu"


def tied() -> torch.nn.ModuleList:
    embedding, head = torch.nn.Embedding(6, 3), torch.nn.Linear(3, 6, bias=False)
    head.weight = embedding.weight
    return torch.nn.ModuleList([embedding, head])


def test_tied_weights_stay_tied_there_and_back() -> None:
    model = tied()
    weight = model[0].weight
    for device in (DEVICE, "cpu", DEVICE):
        model.to(device)
        assert model[0].weight is model[1].weight is weight
        assert weight.device.type == device
        assert len(list(model.parameters())) == 1


def test_an_optimizer_made_before_the_move_goes_on() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    host = model(torch.ones(1, 2)).sum()
    host.backward()  # gradients move too, and the next ones are those of the device
    model.to(DEVICE)
    assert model.weight.grad.device.type == DEVICE
    before = model.weight.detach().clone()
    model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5 * 2)


def test_data_of_a_tensor_can_be_replaced_across_devices() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.data = torch.ones(3, device=DEVICE)
    assert parameter.device.type == DEVICE
    assert parameter.requires_grad
    (parameter * 2).sum().backward()
    assert parameter.grad.tolist() == [2, 2, 2]
    parameter.data = torch.zeros(1)
    assert parameter.device.type == "cpu"


@pytest.mark.parametrize("other", [torch.eye(2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_data_of_another_kind_is_refused(other: torch.Tensor) -> None:
    tensor = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        tensor.data = other
    assert tensor.tolist() == [1, 1]


def test_parameters_without_a_shape_move_as_they_are() -> None:
    layer = torch.nn.LazyLinear(3).to(DEVICE)
    assert layer(torch.ones(2, 5, device=DEVICE)).shape == (2, 3)
    assert layer.weight.device.type == DEVICE


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_encoder_takes_a_padded_batch(mode: type) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = encoder(x, src_key_padding_mask=padding).detach()  # with gradients PyTorch makes no nested tensor
    encoder.to(DEVICE)
    with mode():
        result = encoder(x.to(DEVICE), src_key_padding_mask=padding.to(DEVICE))
    torch.testing.assert_close(result.cpu()[~padding], expected[~padding])
