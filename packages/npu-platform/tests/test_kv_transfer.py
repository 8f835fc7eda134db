"""What NIXL asks the platform: which memory it may read, and copies of blocks between device and host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from npu_platform import config
from npu_platform.platform import NPUPlatform
from tests.support import models
from tests.support.refusals import configure

if TYPE_CHECKING:
    from pathlib import Path

# Logical blocks, heads, tokens, content; as they lie, heads or tokens come first.
SHAPE = (6, 2, 4, 8)
ORDERS = {"heads-first": (0, 1, 2, 3), "tokens-first": (0, 2, 1, 3)}


def cache(device: str, order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a cache of numbers whose memory is laid out in `order`."""
    laid_out = torch.arange(384).remainder(120).to(dtype).view([SHAPE[i] for i in order]).to(device)
    return laid_out.permute(order)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_blocks_are_copied_out_and_in(order: tuple[int, ...], dtype: torch.dtype) -> None:
    device, host = cache("npu", order, dtype), torch.zeros_like(cache("cpu", order, dtype))
    whole = device.cpu()
    NPUPlatform.swap_out_blocks_to_host(device, host, torch.tensor([5, 0, 3], device="npu"), torch.tensor([1, 2, 4]))
    assert torch.equal(host[[1, 2, 4]], whole[[5, 0, 3]])
    assert not host[[0, 3, 5]].any()
    device.zero_()
    NPUPlatform.insert_blocks_to_device(host, device, torch.tensor([4, 1]), torch.tensor([3, 5], device="npu"))
    assert torch.equal(device.cpu()[[3, 5]], whole[[3, 5]])
    assert not device.cpu()[[0, 1, 2, 4]].any()


def test_vllm_s_list_of_devices_has_npu() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import _NIXL_SUPPORTED_DEVICE

    assert _NIXL_SUPPORTED_DEVICE["npu"] == ("npu", "cpu")
    assert NPUPlatform.get_nixl_memory_type() == "DRAM"


@pytest.mark.parametrize(("value", "checks"), [("", False), ("1", True), ("oom@3,memory", True), ("oom@3", False)])
def test_memory_checks_are_known(value: str, checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_DEBUG", value)
    assert config.checks_memory() == checks


def test_nixl_does_not_read_memory_that_is_watched(tmp_path: Path) -> None:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    model = {"model": str(models.tiny_llama(tmp_path, num_hidden_layers=1))}
    cases = {
        name: model | {"kv_transfer_config": transfer | more}
        for name, more in {"npu": {}, "cpu": {"kv_buffer_device": "cpu"}}.items()
    }
    said = configure(cases, NPU_DEBUG="memory")
    assert '"kv_buffer_device": "cpu"' in said["npu"]
    assert said["cpu"] == "accepted"
