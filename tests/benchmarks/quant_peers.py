"""Owns quantised layers and experts as vLLM's CPU build calls them: what ``quant`` and ``quant_experts`` compare with.

Each maker asks the build for its op, and is None where this machine's build has none, as on AVX2. Tiles serve fp8 and
vLLM's choice for int8 and 4 bits, which rounds activations to int8 (``VLLM_CPU_INT4_W4A8``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Layer = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
    Maker = Callable[[int, int], Layer]
    Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

try:
    import vllm._custom_ops as peer
    from vllm.platforms import current_platform

    current_platform.import_kernels()
except ImportError:
    pass

HAS_TILES = torch.cpu._is_amx_tile_supported()

__all__ = [
    "e4m3_weights",
    "experts_fp8",
    "experts_int4",
    "experts_int8",
    "experts_mxfp4",
    "layers_fp8",
    "layers_int4",
    "layers_int8",
]


def e4m3_weights(*size: int) -> torch.Tensor:
    """Weights as a quantiser leaves them: the largest of them are as large as e4m3 goes."""
    return (torch.randn(size) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def layers_int4(group: int, zeros: bool) -> list[Maker]:
    """Weights of 4 bits: W4A16, and W4A8 where vLLM takes it."""

    def w4a16(n: int, k: int) -> Layer:
        def call(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
            isa = "amx" if HAS_TILES else "vec"
            return peer.cpu_gemm_wna16(input=x, q_weight=w, scales=s, zeros=z, bias=None, pack_factor=8, isa_hint=isa)

        zero = (_int32(k // group, n // 8),) if zeros else ()
        return call, (_int32(n // 16, k * 2), torch.rand(k // group, n).bfloat16(), *zero)

    def w4a8(n: int, k: int) -> Layer:
        weight, zero = _int32(k, n // 8), _int32(k // group, n // 8)
        scales = torch.rand(k // group, n).bfloat16()
        packed = peer.convert_weight_packed_scale_zp(weight, zero, scales, peer.CPUQuantAlgo.AWQ)
        return lambda x, w, z, s: torch.ops._C.int4_scaled_mm_cpu(x, w, z, s, None), packed

    return [*_where("cpu_gemm_wna16", w4a16), *(_where("int4_scaled_mm_cpu", w4a8) if HAS_TILES else [])]


def layers_int8() -> list[Maker]:
    """Weights and activations of 8 bits: tiles' kernel where vLLM takes that, else oneDNN's."""

    def tiles(n: int, k: int) -> Layer:
        weight = torch.ops._C.convert_weight_packed(_int8(n, k))
        return lambda x, w, s: torch.ops._C.int8_scaled_mm_with_quant(x, w, s, None, x.dtype, True), (
            weight,
            torch.rand(n),
        )

    def onednn(n: int, k: int) -> Layer:
        handlers: dict[int, Any] = {}  # it packs the weights by itself, once a copy

        def call(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            if w.data_ptr() not in handlers:
                handlers[w.data_ptr()] = peer.create_onednn_scaled_mm(w.t(), s, torch.bfloat16, True, False, 32)
            q, x_scale, x_zero = peer.onednn_scaled_int8_quant(x, None, None, True)
            out = torch.empty(len(x), n, dtype=x.dtype)
            peer.onednn_scaled_mm(handlers[w.data_ptr()], q, out, x_scale, x_zero, None, None)
            return out

        return call, (_int8(n, k), torch.rand(n, 1))

    return _where("int8_scaled_mm_with_quant", tiles) if HAS_TILES else _where("onednn_scaled_mm", onednn)


def layers_fp8(block: int) -> list[Maker]:
    """Weights of 8-bit floats with scales of blocks or, for 0, one for all."""

    def make(n: int, k: int) -> Layer:
        weight = torch.ops._C.convert_weight_packed(e4m3_weights(n, k))
        scale = torch.rand(n // block if block else 1, k // 128)
        size = [block or n, 128]
        return lambda x, w, s: torch.ops._C.fp8_scaled_mm_cpu(x, w, s, size, None, x.dtype, True), (weight, scale)

    return _where("fp8_scaled_mm_cpu", make) if HAS_TILES else []


def experts_fp8(experts: int, hidden: int, width: int) -> Experts | None:
    """Weights of 8-bit floats with scales of blocks of 128."""
    if not _has_experts():
        return None
    weights, scales = [], []
    for n, k in ((2 * width, hidden), (hidden, width)):
        weights.append(torch.ops._C.convert_weight_packed(e4m3_weights(experts, n, k)))
        scales.append(torch.rand(experts, n // 128, k // 128))
    return _experts(weights, peer.CPUQuantMethod.FP8_W8A16, scales, block=[128, 128])


def experts_mxfp4(experts: int, hidden: int, width: int) -> Experts | None:
    """Weights of 4-bit floats, a scale a group of 32."""
    if not _has_experts():
        return None
    weights, scales = [], []
    for n, k in ((2 * width, hidden), (hidden, width)):
        weights.append(
            torch.ops._C.convert_weight_packed(torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8))
        )
        whole = torch.randint(110, 120, (experts, n, k // 32), dtype=torch.uint8)
        scales.append(torch.ops._C.convert_scale_packed(whole))
    return _experts(weights, peer.CPUQuantMethod.MXFP4, scales)


def experts_int4(group: int, experts: int, hidden: int, width: int) -> Experts | None:
    """Weights of 4 bits, activations rounded to int8."""
    if not _has_experts():
        return None
    made = []
    for n, k in ((2 * width, hidden), (hidden, width)):
        weight, zero = _int32(experts, k // 8, n), torch.full((experts, k // group, n // 8), 0x77777777).int()
        scale = torch.rand(experts, k // group, n).bfloat16()
        made.append(peer.convert_weight_packed_scale_zp(weight, zero, scale, peer.CPUQuantAlgo.GPTQ))
    weights, zeros, scales = zip(*made, strict=True)
    return _experts([*weights], peer.CPUQuantMethod.INT4_W4A8, [*scales], [*zeros])


def experts_int8(experts: int, hidden: int, width: int) -> Experts | None:
    """Weights and activations of 8 bits."""
    if not _has_experts():
        return None
    sizes = ((2 * width, hidden), (hidden, width))
    weights = [torch.ops._C.convert_weight_packed(_int8(experts, n, k)) for n, k in sizes]
    return _experts(weights, peer.CPUQuantMethod.INT8_W8A8, [torch.rand(experts, n) for n, _ in sizes])


def _experts(
    weights: list[torch.Tensor],
    method: int,
    scales: list[torch.Tensor],
    zeros: list[torch.Tensor | None] | None = None,
    block: list[int] | None = None,
) -> Experts:
    def call(x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        peer.fused_experts_cpu(out, x, *weights, shares, ids.int(), method, *scales, *(zeros or (None, None)), block)
        return out

    return call


def _has_experts() -> bool:
    return HAS_TILES and hasattr(torch.ops._C, "fused_experts_cpu")


def _where(op: str, make: Maker) -> list[Maker]:
    """Return the layer where the peer's build for this machine has the op."""
    return [make] if hasattr(torch.ops._C, op) else []


def _int32(*size: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32)


def _int8(*size: int) -> torch.Tensor:
    return torch.randint(-127, 128, size, dtype=torch.int8)
