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


@pytest.mark.parametrize(("n", "k"), [(32, 8), (70, 102), (1, 1)])
def test_bytes_keep_their_dtype(n, k):
    weight = torch.randint(0, 127, (n, k), dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = panels.pack_bytes(weight)
    assert packed.dtype is torch.float8_e4m3fn
    assert torch.equal(packed.view(torch.int8), panels.pack(weight.view(torch.int8), 8).view(torch.int8))
    back = panels.unpack_bytes(packed, n, k)
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))


@pytest.mark.parametrize(
    ("group", "fits"),
    [(0, True), (2, False), (4, True), (32, True), (96, False), (128, True), (256, True), (300, True)],
)
def test_what_groups_fit_panels(group, fits):
    assert panels.fit_panels(group, 300) is fits


def test_dequantize_scales_each_group():
    w, scales, zeros = torch.randint(0, 16, (40, 64)), torch.rand(40, 2), torch.randint(0, 16, (40, 2))
    packed = panels.pack(w, 4), panels.pack_groups(scales), panels.pack_groups(zeros.to(torch.int8))
    groups = torch.arange(64) // 32
    expected = (w - zeros[:, groups]) * scales[:, groups]
    assert torch.equal(panels.dequantize(*packed, 40, 64, 32), expected)
    assert torch.equal(panels.dequantize(packed[0], packed[1], None, 40, 64, 32), (w - 8) * scales[:, groups])


def test_rows_are_rounded_by_their_largest_magnitude():
    weight = torch.randn(70, 24, dtype=torch.bfloat16)
    weight[3] = 0
    codes, scales = panels.pack_rounded(weight)
    rounded = panels.dequantize(codes, scales, None, 70, 24, 1 << 30)
    error = (rounded - weight.float()).abs()
    assert (error <= weight.float().abs().amax(1, keepdim=True) / 127 / 2 * 1.001).all()
    assert rounded[3].eq(0).all()


def test_many_rows_are_rounded_as_few_are(monkeypatch):
    weight = torch.randn(100, 8)
    whole = panels.pack_rounded(weight)
    monkeypatch.setattr(panels, "_AT_ONCE", panels.COLUMNS)
    for got, expected in zip(panels.pack_rounded(weight), whole, strict=True):
        assert torch.equal(got, expected)
