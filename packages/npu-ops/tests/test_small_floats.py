"""Weights in MXFP8 and NVFP4 mean what compressed-tensors' own compressors say they mean."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from npu_ops import panels


def compressed(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what the format's checkpoint holds of a weight, and what that means."""
    scheme: QuantizationScheme = preset_name_to_scheme(name, ["Linear"])
    parts = weight.unflatten(-1, (-1, scheme.weights.group_size))
    state = {"weight": weight}
    whole = {}
    if name == "NVFP4":
        state["weight_global_scale"] = whole["global_scale"] = 448 * 6 / weight.abs().max().reshape(1)
    state["weight_scale"], state["weight_zero_point"] = calculate_qparams(
        parts.amin(-1), parts.amax(-1), scheme.weights, **whole
    )
    compressor = BaseCompressor.get_value_from_registry(
        {"NVFP4": "nvfp4-pack-quantized", "MXFP8": "mxfp8-quantized"}[name]
    )
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"].float()


@pytest.fixture
def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(48, 96, generator=generator) * torch.logspace(-4, 1, 48)[:, None]


def test_mxfp8_is_kept_as_it_is(weight: torch.Tensor) -> None:
    from npu_ops.layers.quantization.mxfp8 import BLOCK, integers

    stored, exact = compressed("MXFP8", weight)
    stored["weight"].view(torch.uint8)[0, 0], exact[0, 0] = 128, 0  # a negative zero
    codes, scales, *_ = integers(stored["weight"], stored["weight_scale"])
    assert not (codes == 128).any()
    made = panels.dequantize(panels.pack(codes, 8), panels.pack_groups(scales), None, *weight.shape, BLOCK)
    torch.testing.assert_close(made, exact, atol=0, rtol=0)
    for of in ("weight", "weight_scale"):
        damaged = stored | {of: torch.full_like(stored[of].view(torch.uint8), 255).view(stored[of].dtype)}
        with pytest.raises(ValueError, match="the checkpoint is damaged"):
            integers(damaged["weight"], damaged["weight_scale"])


def test_nvfp4_is_kept_as_it_is(weight: torch.Tensor) -> None:
    from npu_ops.layers.quantization.nvfp4 import BLOCK, whole_numbers

    stored, rounded = compressed("NVFP4", weight)
    factors = (1 / stored["weight_global_scale"]).expand(len(weight))
    scales = panels.pack_scaled_groups(whole_numbers(stored["weight_scale"]), factors)
    packed = panels.pack(panels.e2m1_codes(stored["weight_packed"]), 4)
    made = panels.dequantize(packed, scales, None, *weight.shape, BLOCK)
    torch.testing.assert_close(made, rounded, atol=0, rtol=2**-8)  # their compressor gives bfloat16
    codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, torch.float64)
    exact = codes * (stored["weight_scale"].double() / stored["weight_global_scale"]).repeat_interleave(BLOCK, 1)
    torch.testing.assert_close(made.double(), exact, atol=0, rtol=2**-22)
    with pytest.raises(ValueError, match="the checkpoint is damaged"):
        whole_numbers(torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("rows", "k", "parts", "in_place"), [(128, 12, 2, True), (96, 8, 2, False), (64, 10, 1, False)]
)
def test_experts_in_fp8_are_packed_where_they_are(rows: int, k: int, parts: int, in_place: bool) -> None:
    from npu_ops.layers.quantization.experts import QuantizedExperts

    weight = torch.randint(0, 127, (3, rows, k), dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = [torch.cat([panels.pack_bytes(part) for part in expert.chunk(parts)]) for expert in weight]
    packed = QuantizedExperts._in_panels(weight, parts)
    assert torch.equal(packed.view(torch.uint8), torch.stack(expected).view(torch.uint8))
    assert (packed.data_ptr() == weight.data_ptr()) is in_place
