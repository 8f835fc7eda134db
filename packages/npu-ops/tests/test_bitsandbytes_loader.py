"""Matrices that bitsandbytes 0.50.2 packed mean here what they mean to it; which checkpoints are taken, and by whom read."""

from __future__ import annotations

import json

import pytest
import torch
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.model_loader import get_model_loader

from npu_ops.errors import CheckpointError
from npu_ops.layers import bitsandbytes_loader

# sin(linspace(-1, 1, 128)) as [2, 64], the second row three times as large, in bfloat16: blocks of 64, their scales nested
PACKED = (
    "000000000000001111111111111111222222222333333344444555555666667777888899999aaaaabbbbbcccccccddddddddeeeeeeeeeeeeeeeeff"
    "ffffffffff"
)
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
SAID = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 64], "nested_blocksize": 256}
SAID |= {"nested_dtype": "float32", "nested_offset": 1.685546875}
MEANT = {0: -0.8457900881767273, 1: -0.8457900881767273, 40: -0.3340173065662384, 63: 0.0, 64: 0.0}
MEANT |= {100: 1.8299845457077026, 127: 2.53125}


def parts() -> dict[str, torch.Tensor]:
    scales = torch.linspace(-0.992968738079071, 1.0, 256)  # of which the first and the last are used
    return {
        "x.weight.absmax": torch.tensor([0, 255], dtype=torch.uint8),
        "x.weight.nested_absmax": torch.tensor([0.845703125]),
        "x.weight.nested_quant_map": scales,
        "x.weight.quant_map": torch.tensor(NF4),
        "x.weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(SAID).encode()], dtype=torch.uint8),
    }


def test_four_bits() -> None:
    packed = torch.tensor([[octet] for octet in bytes.fromhex(PACKED)], dtype=torch.uint8)
    made = bitsandbytes_loader.dequantised("x.weight", packed, parts(), torch.float32)
    assert made.shape == (2, 64)
    found = made.flatten()[[*MEANT]]
    torch.testing.assert_close(found, torch.tensor([*MEANT.values()]), atol=1e-7, rtol=0)
    stored_otherwise = packed.reshape(-1).view(torch.bfloat16)[:, None]  # bnb_4bit_quant_storage
    again = bitsandbytes_loader.dequantised("x.weight", stored_otherwise, parts(), torch.bfloat16)
    assert torch.equal(again, made.bfloat16())


def test_eight_bits() -> None:
    codes = torch.tensor([[-127, -94, -50, -1], [1, 50, 93, 127]], dtype=torch.int8)
    beside = {"x.SCB": torch.tensor([0.83984375, 2.53125]), "x.weight_format": torch.tensor(0, dtype=torch.uint8)}
    made = bitsandbytes_loader.dequantised("x.weight", codes, beside, torch.float32)
    expected = [[-0.83984375, -0.6216166019439697, -0.33064714074134827, -0.006612943019717932]]
    expected += [[0.01993110217154026, 0.9965550899505615, 1.8535925149917603, 2.53125]]
    torch.testing.assert_close(made, torch.tensor(expected), atol=1e-6, rtol=0)
    with pytest.raises(CheckpointError, match="not row by row"):
        bitsandbytes_loader.dequantised("x.weight", codes, beside | {"x.weight_format": torch.tensor(1)}, torch.float32)


def test_what_is_not_quantised_stays() -> None:
    bias = torch.ones(3)
    assert bitsandbytes_loader.dequantised("x.bias", bias, parts(), torch.bfloat16) is bias


def test_checkpoints_are_taken_without_a_flag() -> None:
    method = get_quantization_config("npu_bitsandbytes")
    theirs = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert "bitsandbytes" not in QUANTIZATION_METHODS  # nor is vllm-bnb-plugin, which registers it
    assert method.override_quantization_method(theirs, None) == "npu_bitsandbytes"
    assert method.override_quantization_method(theirs, "bitsandbytes") == "npu_bitsandbytes"
    assert method.override_quantization_method({"quant_method": "gptq"}, None) is None


def test_another_loader_is_refused() -> None:
    layer, config = ReplicatedLinear.__new__(ReplicatedLinear), bitsandbytes_loader.NpuBitsAndBytesConfig()
    with set_current_vllm_config(VllmConfig()), pytest.raises(CheckpointError, match="pass --load-format npu_bits"):
        config.get_quant_method(layer, "x")
    load = LoadConfig(load_format="npu_bitsandbytes")
    assert isinstance(get_model_loader(load), bitsandbytes_loader.BitsAndBytesLoader)
    with set_current_vllm_config(VllmConfig(load_config=load)):
        assert isinstance(config.get_quant_method(layer, "x"), UnquantizedLinearMethod)
        assert config.get_quant_method(torch.nn.Embedding(2, 2), "x") is None
