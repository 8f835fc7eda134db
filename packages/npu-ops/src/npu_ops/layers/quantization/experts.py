"""Owns what quantised experts have in common: how weights become what the kernels read, and the call of the kernels.

vLLM 0.32 chooses experts' kernels from lists of its own, without a place for out-of-tree platforms. So each method here
is a subclass of vLLM's for the same checkpoints, which keeps vLLM's parameters and loading, and leaves out its choice;
the registered quantisation configurations return them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from npu_ops import native, panels
from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.moe import gate_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

ops = torch.ops.npu_ops
WHOLE = 1 << 30
"""A group or block that holds whole rows."""


class Integers(NamedTuple):
    """One expert's weights [N, K] as uint8 (4 bits: 0 to 15; e4m3) or int8, with scales and zero points [N, groups].

    factors: float32 [N], of scales in float8_e4m3fn.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None


class QuantizedExperts(FusedMoEMethodBase):
    """An experts' method on a kernel of npu-ops; a subclass packs the weights with one of the pack_ methods."""

    interleaves = False
    """Whether checkpoints with gate and up rows in turn are loaded; else such models are refused."""

    def begin(self, moe: FusedMoEConfig) -> None:
        """Take the place of the base method's __init__; raises UnsupportedLayerError for what has no kernel."""
        FusedMoEMethodBase.__init__(self, moe)
        self.gate = gate_of(moe)
        if self.gate.interleaved and not self.interleaves:
            msg = (
                f"this checkpoint's experts have gate and up rows in turn, which {type(self).__name__} does not load: "
                "serve the model's MXFP4 or unquantised checkpoint."
            )
            raise UnsupportedLayerError(msg)

    @property
    def is_monolithic(self) -> bool:
        """False: the router chooses the experts first."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """False: the kernels have no replicas of experts."""
        return False

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: that is for vLLM's own kernels."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x: [T, H]; topk_weights, topk_ids: [T, K]. Returns [T, H], this rank's part of it."""
        tensors = [None if value is None else value.data for value in (getattr(layer, name) for name in self.names)]
        routing = (topk_weights, topk_ids, layer.npu_bias13, layer.npu_bias2, layer.expert_map)
        return self.op(x, *tensors, *routing, *self.numbers, *self.gate_arguments(), layer.apply_router_weight_on_input)

    def gate_arguments(self) -> tuple[Any, ...]:
        """Return what the op is told of the gate; rows that take turns with the ups' were parted when packed."""
        activation, _, *numbers = self.gate
        return activation, *numbers

    def npu_implementation(self) -> str:
        """Return the op that runs these experts, and their weights' format."""
        return f"npu_ops::{self.op.__name__} ({self.format})"

    # ---- packing ----

    def pack_integers(
        self, layer: Any, bits: int, group: int, w13: Callable[[int], Integers], w2: Callable[[int], Integers]
    ) -> None:
        """For weight_only_experts: one expert after another, each freed when packed. group -1: whole rows."""
        group = WHOLE if group == -1 else group
        if group != WHOLE and (group < 4 or (128 % group and group % 128)):
            msg = f"groups of {group}: experts take divisors of 128 from 4 on, multiples of 128, or whole channels."
            raise UnsupportedLayerError(msg)
        first, second = (self._integers(layer, bits, group, *of) for of in ((w13, self._parts()), (w2, 1)))
        self._finish(layer, ops.weight_only_experts, (*first, *second), (self._width(layer), group), f"int{bits}")
        if first[1].dtype == torch.uint8:
            self.format = "mxfp4" if bits == 4 else "mxfp8"

    def pack_int8(self, layer: Any, w13: Tensor, scale13: Tensor, w2: Tensor, scale2: Tensor) -> None:
        """For int8_experts: int8 [E, rows, K] and scales with a value a row."""
        tensors = []
        for weight, scale, parts in ((w13, scale13, self._parts()), (w2, scale2, 1)):
            rows = [[panels.pack(part.contiguous(), 8) for part in self._split(w, parts)] for w in weight]
            scales = [self._split(s, parts) for s in scale.float().view(len(scale), -1)]
            padded = [[F.pad(part, (0, -len(part) % panels.COLUMNS)) for part in expert] for expert in scales]
            tensors += [torch.stack([torch.cat(of) for of in every]) for every in (rows, padded)]
        self._finish(layer, ops.int8_experts, tuple(tensors), (self._width(layer),), "int8, activations int8")

    def pack_fp8(
        self,
        layer: Any,
        weights: tuple[Tensor, Tensor],
        scales: tuple[Tensor, Tensor],
        block: tuple[int, int] | None,
        x_group: int,
        x_scales: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """For fp8_experts: float8_e4m3fn [E, rows, K]; scales a tensor, projection or row, or a block."""
        tensors: list[Tensor] = []
        for weight, scale, parts in zip(weights, scales, (self._parts(), 1), strict=True):
            tensors += self._fp8(weight, scale.float(), parts, block is None)
        if self._packs_fp8(tensors[2].shape, (block or (1, WHOLE))[1], x_group):
            tensors[0], tensors[2] = self._in_panels(tensors[0], self._parts()), self._in_panels(tensors[2], 1)
        x_scale = tuple(None if s is None else s.float().max().reshape(1) for s in x_scales)
        layer.npu_x_scale13, layer.npu_x_scale2 = x_scale
        self._finish(layer, ops.fp8_experts, tuple(tensors), (*x_scale, x_group, *(block or (1, WHOLE))), "fp8")

    def _packs_fp8(self, down: torch.Size, block: int, group: int) -> bool:
        """Whether the kernels in use read panels sooner: down: [E, H, I]."""
        _, hidden, width = down
        fit = all(panels.fit_panels(size, max(hidden, width)) for size in (block, max(group, 0)))
        return native.reads_fp8_panels() and self.moe.in_dtype == torch.bfloat16 and width % 4 == 0 and fit

    @staticmethod
    def _in_panels(weight: Tensor, parts: int) -> Tensor:
        """Pack [E, rows, K] one expert after another, in its own place where panels take as much."""
        experts, rows, k = weight.shape
        if k % 4 or rows % (parts * panels.COLUMNS):
            return torch.stack([torch.cat([panels.pack_bytes(part) for part in each.chunk(parts)]) for each in weight])
        packed = weight.view(experts, rows // panels.COLUMNS, k // 4, 4 * panels.COLUMNS)
        for expert, each in enumerate(weight):
            packed[expert] = panels.pack_bytes(each)
        return packed

    def _fp8(self, weight: Tensor, scale: Tensor, parts: int, by_row: bool) -> tuple[Tensor, Tensor]:
        if (weight.view(torch.uint8) & 127 == 127).any():
            msg = "there is NaN among a layer's fp8 experts: the checkpoint is damaged."
            raise ValueError(msg)
        experts, rows, _ = weight.shape
        if by_row:  # a value for each row, whatever it was
            scale = scale.reshape(experts, -1)
            scale = scale.repeat_interleave(rows // scale.shape[1], 1)
        if parts == 2 and self.gate.interleaved:
            if not by_row:
                msg = "experts with gate and up rows in turn have no kernel for fp8 blocks: quantise by channel."
                raise UnsupportedLayerError(msg)
            weight, scale = (torch.cat((of[:, ::2], of[:, 1::2]), dim=1) for of in (weight, scale))
        return weight.contiguous(), scale.contiguous()

    def _integers(
        self, layer: Any, bits: int, group: int, matrix: Callable[[int], Integers], parts: int
    ) -> tuple[Tensor, ...]:
        packed: list[list[Tensor]] = [[], [], []]
        for expert in range(layer.local_num_experts):
            values, scales, zeros, factors = matrix(expert)
            if scales.shape[1] != -(-values.shape[1] // group):
                msg = (
                    f"{values.shape[1]} inputs of an expert are no whole number of groups of {group}: "
                    "lower --tensor-parallel-size, or pass --enable-expert-parallel."
                )
                raise UnsupportedLayerError(msg)
            packed[0].append(torch.cat([panels.pack(part.contiguous(), bits) for part in self._split(values, parts)]))
            pieces = [self._split(of, parts) for of in (scales, factors) if of is not None]
            pack = panels.pack_groups if factors is None else panels.pack_scaled_groups
            packed[1].append(torch.cat([pack(*of) for of in zip(*pieces, strict=True)]))
            if zeros is not None:
                packed[2].append(torch.cat([panels.pack_groups(part) for part in self._split(zeros, parts)]))
        return tuple(torch.stack(tensors) if tensors else None for tensors in packed)  # type: ignore[misc]

    def _split(self, rows: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Gate rows and up rows."""
        if parts == 2 and self.gate.interleaved:
            return rows[::2], rows[1::2]
        return rows.chunk(parts)

    def _parts(self) -> int:
        return self.moe.w13_num_shards

    def _width(self, layer: Any) -> int:
        return layer.intermediate_size_per_partition

    def _finish(
        self, layer: Any, op: Any, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...], name: str
    ) -> None:
        """Keep the packed tensors in place of the checkpoint's."""
        self.op, self.numbers, self.format = op, numbers, name
        biases = [getattr(layer, f"{w}_bias", None) for w in ("w13", "w2")]
        biases = [None if b is None else b.data.to(self.moe.in_dtype) for b in biases]
        if biases[0] is not None:
            gates_and_ups = self._split(biases[0].t(), self._parts())
            biases[0] = torch.cat(gates_and_ups).t().contiguous()
        for parameter in [key for key, _ in layer.named_parameters(recurse=False) if key.startswith(("w13_", "w2_"))]:
            delattr(layer, parameter)
        self.names = []
        for i, tensor in enumerate(tensors):
            key = f"npu_experts_{i}"
            layer.register_parameter(key, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
            self.names.append(key)
        layer.npu_bias13, layer.npu_bias2 = biases
