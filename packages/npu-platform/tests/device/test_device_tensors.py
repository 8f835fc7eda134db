"""npu tensors behave as CPU tensors do: the same values, dtypes, views, errors."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICE = "npu"


def both(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.randn(*shape).to(dtype)
    return host, host.to(DEVICE)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.sort(-1, descending=True)[0],
        lambda x: x.topk(5)[0],
        lambda x: x.cumsum(0),
        lambda x: x.argmax(-1),
        lambda x: x.softmax(-1),
        lambda x: x.masked_fill(x > 0, -1),
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x @ x.t(),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: torch.cat([x, x.flip(0)], 1),
        lambda x: x[:, ::2].contiguous(),
        lambda x: x.as_strided((4, 3), (2, 1), 5),
        lambda x: x.view(torch.int32),
        lambda x: x.unique(),
        lambda x: x.nonzero(),
        lambda x: torch.fft.rfft(x).abs(),
        torch.linalg.svdvals,
        lambda x: x.index_select(0, torch.tensor([2, 0], device=x.device)),
        lambda x: torch.stack(torch._foreach_add(list(x), 1.0)),
    ],
)
def test_op_gives_the_values_of_the_cpu(op) -> None:
    host, device = both(8, 16)
    result = op(device)
    assert result.device == torch.device("npu", 0)
    torch.testing.assert_close(result.cpu(), op(host))


def test_index_put_in_place_accumulates() -> None:
    host, device = both(6, 4)
    rows = torch.tensor([1, 1, 5])
    host.index_put_((rows,), torch.ones(3, 4), accumulate=True)
    device.index_put_((rows.to(DEVICE),), torch.ones(3, 4, device=DEVICE), accumulate=True)
    assert torch.equal(device.cpu(), host)


def test_out_argument_is_resized_on_the_device() -> None:
    host, device = both(4, 5)
    out = torch.empty(0, device=DEVICE)
    torch.add(device, 1, out=out)
    assert torch.equal(out.cpu(), host + 1)
    assert out.untyped_storage().device.type == "npu"


def test_more_than_two_gibibytes() -> None:
    zeros = torch.zeros((1 << 31) + 512, dtype=torch.int8, device=DEVICE)
    assert zeros[-1].item() == 0
    zeros[-1] = 3
    assert zeros[(1 << 31) :].sum().item() == 3


def test_large_memory_is_zeroed_again_when_it_is_reused() -> None:
    elements = 48 << 20
    first = torch.zeros(elements, dtype=torch.int8, device=DEVICE)
    first.fill_(5)
    del first
    again = torch.empty(elements, dtype=torch.int8, device=DEVICE)
    assert again.zero_().any().item() is False


@pytest.mark.parametrize("causal", [True, False])
def test_attention_takes_the_flash_kernel_of_the_cpu(causal: bool) -> None:
    host, device = zip(*(both(2, 4, 32, 16, dtype=torch.bfloat16) for _ in range(3)), strict=True)
    with torch.profiler.profile() as profile:
        result = F.scaled_dot_product_attention(*device, is_causal=causal)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {event.key for event in profile.key_averages()}
    assert torch.equal(result.cpu(), F.scaled_dot_product_attention(*host, is_causal=causal))


def test_attention_has_a_backward() -> None:
    host, device = both(1, 2, 8, 4)
    host.requires_grad_()
    device.requires_grad_()
    for tensor in (host, device):
        F.scaled_dot_product_attention(tensor, tensor, tensor).square().sum().backward()
    torch.testing.assert_close(device.grad.cpu(), host.grad)


def test_inference_mode() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(6, device=DEVICE)
        tensor.view(2, 3)[1] += 1
        assert tensor.is_inference()
    assert tensor.cpu().tolist() == [0, 0, 0, 1, 1, 1]


def test_fake_tensors_need_no_device_memory() -> None:
    before = torch.npu.memory_allocated()
    with FakeTensorMode():
        result = torch.empty(1 << 20, 1 << 20, device=DEVICE).t() @ torch.empty(1 << 20, 8, device=DEVICE)
    assert result.shape == (1 << 20, 8)
    assert result.device.type == "npu"
    assert torch.npu.memory_allocated() == before


def test_module_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).to(DEVICE)
    inputs = torch.randn(64, 4, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_tensor_of_the_host_beside_one_of_the_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device.*npu:0 and cpu"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    assert (torch.ones(3, device=DEVICE) + torch.tensor(2.0)).tolist() == [3, 3, 3]


def test_op_that_writes_to_a_tensor_of_the_host_returns_it() -> None:
    converted = torch.empty(3, dtype=torch.float64)
    assert converted.copy_(torch.ones(3, device=DEVICE)) is converted
    assert converted.tolist() == [1, 1, 1]


def test_weak_reference_shares_memory_and_does_not_keep_it() -> None:
    tensor = torch.arange(1000, device=DEVICE)[10:]
    held = torch.npu.memory_allocated()
    weak = torch.ops._C.weak_ref_tensor(tensor)
    assert weak.data_ptr() == tensor.data_ptr()
    assert torch.equal(weak, tensor)
    del tensor
    assert torch.npu.memory_allocated() < held


def test_op_without_any_kernel_names_the_way_out() -> None:
    with torch.library._scoped_library("npu_test", "FRAGMENT") as library:
        library.define("nowhere(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError, match=r"npu_test::nowhere.*torch\.library\.impl"):
            torch.ops.npu_test.nowhere(torch.ones(1, device=DEVICE))


@pytest.mark.skipif(
    "NPU_DEBUG" in os.environ, reason="it reads device memory on the host, which NPU_DEBUG=memory forbids"
)
def test_python_kernel_of_the_cpu_may_keep_its_argument() -> None:
    kept = []
    with torch.library._scoped_library("npu_test", "FRAGMENT") as library:
        library.define("keeper(Tensor x) -> Tensor")
        library.impl("keeper", lambda x: (kept.append(x), x + 1)[1], "CPU")
        tensor = torch.arange(5.0, device=DEVICE)
        result = torch.ops.npu_test.keeper(tensor)
        assert result.device.type == "npu"
    del tensor
    assert kept[0].tolist() == [0, 1, 2, 3, 4]


def test_host_memory_returned_by_a_kernel_moves_to_the_device() -> None:
    numpy = pytest.importorskip("numpy")
    with torch.library._scoped_library("npu_test", "FRAGMENT") as library:
        library.define("from_host(Tensor x) -> Tensor")
        library.impl("from_host", lambda x: torch.from_numpy(numpy.arange(6.0)), "CPU")
        result = torch.ops.npu_test.from_host(torch.ones(1, device=DEVICE))
    assert result.device.type == "npu"
    assert result.tolist() == list(range(6))


@pytest.mark.parametrize("size", [2, 400])
def test_memory_of_the_host_is_refused_whatever_its_size(size: int) -> None:
    with pytest.raises(RuntimeError, match='on device "npu:0" to a storage on different device "cpu"'):
        torch.empty(0, device=DEVICE).set_(torch.ones(4).untyped_storage(), 0, (size,), (1,))
