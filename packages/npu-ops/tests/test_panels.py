"""The packed layout of integer weights."""

from __future__ import annotations

import pytest
import torch

from npu_ops import panels


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(32, 8), (70, 100), (33, 13), (1, 1)])
def test_unpack_undoes_pack(bits, n, k):
    weight = torch.randint(0, 16, (n, k)) if bits == 4 else torch.randint(-128, 128, (n, k)).to(torch.int8)
    packed = panels.pack(weight, bits)
    assert packed.shape == (-(-n // 32), -(-k // 4), 16 * bits)
    assert torch.equal(panels.unpack(packed, n, k), weight.int())


def test_dequantize_scales_each_group():
    w, scales, zeros = torch.randint(0, 16, (40, 64)), torch.rand(40, 2), torch.randint(0, 16, (40, 2))
    packed = panels.pack(w, 4), panels.pack_groups(scales), panels.pack_groups(zeros.to(torch.int8))
    groups = torch.arange(64) // 32
    expected = (w - zeros[:, groups]) * scales[:, groups]
    assert torch.equal(panels.dequantize(*packed, 40, 64, 32), expected)
    assert torch.equal(panels.dequantize(packed[0], packed[1], None, 40, 64, 32), (w - 8) * scales[:, groups])
