"""Owns the packed layout of weights of 4 and 8 bits: panels of 32 columns, as csrc/vector/panels.h reads them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "COLUMNS",
    "codes_of_e2m1",
    "dequantize",
    "e2m1_codes",
    "e4m3_codes",
    "fit_panels",
    "pack",
    "pack_bytes",
    "pack_groups",
    "pack_rounded",
    "pack_scaled_groups",
    "unpack",
    "unpack_bytes",
]

COLUMNS = 32
"""Output columns of a panel; weights, scales and zero points are padded to whole panels."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the first eight codes of e2m1 (OCP Microscaling Formats 1.0); the others are their negatives."""

_UNIT = 4  # elements of k that lie together
_FACTOR_ROWS = 4  # of 32 bytes, for a float32 each
_BLOCK = 128  # elements of k at a time
_MOST = 127  # of int8 with its negative
_NEGATIVE_ZERO = 128  # of e4m3
_AT_ONCE = 256 * COLUMNS  # rows: the head of a model has 150,000, and takes twice its memory in float32


def pack(weight: Tensor, bits: int) -> Tensor:
    """Pack integer weights [N, K] into uint8 [panels, ceil(K / 4), 64 bytes for 4 bits, 128 for 8].

    4 bits: values 0 to 15; 8 bits: int8. Padding is zero.
    """
    n, k = weight.shape
    padded = weight.to(torch.uint8) if bits == 4 else weight.view(torch.uint8)
    if k % _UNIT or n % COLUMNS:
        padded = F.pad(padded, (0, -k % _UNIT, 0, -n % COLUMNS))
    # pairs as words, which take a half to a quarter of the time that bytes take: [panel, vector, column, unit, pair]
    words = padded.contiguous().view(torch.int16).view(-1, 4, 8, padded.shape[1] // _UNIT, 2)
    if bits == 8:
        return words.permute(0, 3, 1, 4, 2).reshape(*_units(padded), 64).view(torch.uint8)
    a, b, c, d = words.permute(1, 0, 3, 4, 2)
    first, second = a | b << 4, c | d << 4  # of each element of a pair a byte
    elements = (first & 0xFF) | second << 8, (first >> 8 & 0xFF) | (second & -0x100)
    return torch.stack(elements, dim=-1).view(*_units(padded), 32).view(torch.uint8)


def _units(padded: Tensor) -> tuple[int, int]:
    return padded.shape[0] // COLUMNS, padded.shape[1] // _UNIT


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """Undo `pack`: int32 [n, k]."""
    panels, units, width = packed.shape
    if width == 128:
        parts = packed.view(torch.int8).view(panels, units, 4, 2, 8, 2).permute(0, 2, 4, 1, 3, 5)
    else:
        words = packed.view(panels, units, 2, 8, 2, 2)
        nibbles = torch.stack((words & 15, words >> 4), dim=-1)  # [.., element, byte, nibble]
        parts = nibbles.reshape(panels, units, 2, 8, 2, 4).permute(0, 5, 3, 1, 2, 4)
    return parts.reshape(panels * COLUMNS, units * _UNIT)[:n, :k].to(torch.int32)


def pack_bytes(weight: Tensor) -> Tensor:
    """Pack weights [N, K] of any dtype of eight bits, float8_e4m3fn say, as `pack` packs int8; the dtype stays."""
    return pack(weight.view(torch.int8), 8).view(weight.dtype)


def unpack_bytes(packed: Tensor, n: int, k: int) -> Tensor:
    """Undo `pack_bytes`: [n, k] of the same dtype."""
    return unpack(packed.view(torch.uint8), n, k).to(torch.int8).view(packed.dtype)


def fit_panels(group: int, k: int) -> bool:
    """Whether scales for each `group` of k elements (0: none) go with the blocks of 128 in which panels are read."""
    return group >= k or (group % _UNIT == 0 and (group == 0 or _BLOCK % group == 0 or group % _BLOCK == 0))


def pack_groups(values: Tensor) -> Tensor:
    """Put scales or zero points [N, groups] in the order in which panels are read: [panels, groups, 32]."""
    n, groups = values.shape
    return F.pad(values, (0, 0, 0, -n % COLUMNS)).view(-1, COLUMNS, groups).transpose(1, 2).contiguous()


def pack_scaled_groups(scales: Tensor, factors: Tensor) -> Tensor:
    """Put the scales of NVFP4, float8_e4m3fn [N, groups], behind the float32 factors [N] of their columns.

    Returns float8_e4m3fn [panels, 4 + groups, 32]: a panel's first four rows are the bytes of its 32 factors.
    """
    padded = F.pad(factors.float(), (0, -len(factors) % COLUMNS)).contiguous()
    codes = pack_groups(scales.view(torch.uint8))
    return torch.cat((padded.view(torch.uint8).view(-1, _FACTOR_ROWS, COLUMNS), codes), dim=1).view(scales.dtype)


def pack_rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of weight [N, K] to int8 by its largest magnitude; return the packed codes and float32 scales."""
    pieces = [_rounded(rows) for rows in weight.split(_AT_ONCE)]
    codes = torch.cat([pack(codes, 8) for codes, _ in pieces])
    return codes, pack_groups(torch.cat([scales for _, scales in pieces]))


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True).float() / _MOST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.float() / scale).round().clamp(-_MOST, _MOST).to(torch.int8), scale


def e2m1_codes(packed: Tensor) -> Tensor:
    """Part the e2m1 codes of a checkpoint, uint8 [.., K / 2] with the first in the lower half; as codes_of_e2m1."""
    return codes_of_e2m1(torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2))


def codes_of_e2m1(codes: Tensor) -> Tensor:
    """Put e2m1 codes (uint8, 0 to 15) in the order of their values, as the kernels' table has them."""
    return torch.where(codes < 8, codes + 8, 15 - codes)


def e4m3_codes(weight: Tensor) -> Tensor:
    """Return the codes of MXFP8, float8_e4m3fn [..], as uint8: zeros lose their sign.

    The kernels subtract from the exponents of all codes, which would make a negative zero some other number.
    """
    codes = weight.view(torch.uint8)
    return codes.masked_fill(codes == _NEGATIVE_ZERO, 0)


def dequantize(packed: Tensor, scales: Tensor, zeros: Tensor | None, n: int, k: int, group_size: int) -> Tensor:
    """Return the weights as float32 [n, k]: (value - zero) * scale.

    With scales in uint8 (e8m0) they are MXFP4, of codes of 8 bits MXFP8; with those of `pack_scaled_groups` NVFP4.
    """
    groups = torch.arange(k, device=packed.device) // group_size

    def spread(values: Tensor) -> Tensor:
        return values.transpose(1, 2).reshape(-1, values.shape[1])[:n, groups]

    if scales.dtype == torch.uint8:
        powers = torch.exp2(spread(scales).double() - 127).float()
    if scales.dtype == torch.uint8 and packed.shape[-1] == 128:
        return unpack_bytes(packed.view(torch.float8_e4m3fn), n, k).float() * powers
    if scales.dtype in (torch.uint8, torch.float8_e4m3fn):
        values = torch.tensor([-v for v in reversed(E2M1)] + list(E2M1), device=packed.device)
        values = values[unpack(packed, n, k).long()]
        if scales.dtype == torch.uint8:
            return values * powers
        factors = scales[:, :_FACTOR_ROWS].contiguous().view(torch.float32).reshape(-1)[:n, None]
        return values * (spread(scales[:, _FACTOR_ROWS:].float()) * factors)
    zero = spread(zeros).int() if zeros is not None else 8 if packed.shape[-1] == 64 else 0
    return (unpack(packed, n, k) - zero).float() * spread(scales).float()
