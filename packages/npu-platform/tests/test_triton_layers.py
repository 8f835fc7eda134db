"""What npu changes in vLLM's layers of Triton kernels, and that vLLM's own does not do it yet."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.layers.mamba.ops import gather_initial_states as vllms

from npu_platform import triton_layers


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_states_of_requests_that_begin_are_zero(index: torch.dtype) -> None:
    states = torch.randn(6, 2, 3, 4)
    states[0] = torch.nan  # of no request
    indices, has_initial_state = torch.tensor([4, -1, 2], dtype=index), torch.tensor([True, False, True])
    gathered = triton_layers.gather_initial_states(states.to("npu"), indices.to("npu"), has_initial_state.to("npu"))
    assert torch.equal(gathered.cpu(), torch.stack([states[4], torch.zeros(2, 3, 4), states[2]]))


def test_vllms_own_still_wants_a_gpu() -> None:
    arguments = torch.zeros(2, 3, device="npu"), torch.zeros(1, dtype=torch.int32, device="npu")
    with pytest.raises(AssertionError):
        vllms.gather_initial_states(*arguments, torch.ones(1, dtype=torch.bool, device="npu"))


def test_parts_of_a_convolution_are_loaded_by_their_attribute() -> None:
    widths, weight = [4, 4, 2], torch.zeros(5, 1, 3)
    parts = [torch.randn(width, 3) for width in widths]
    load = triton_layers.fused_convolution_loader(widths, ranks=2, rank=1)
    for number, part in enumerate(parts):
        part.shard_id = number  # type: ignore[attr-defined]
        load(weight, part)
    assert torch.equal(weight[:, 0], torch.cat([part[len(part) // 2 :] for part in parts]))


def test_vllms_own_loader_still_wants_an_argument() -> None:
    load = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader([4, 4, 2], 1, 0)
    with pytest.raises(TypeError):
        load(torch.zeros(10, 1, 3), torch.zeros(4, 3))
