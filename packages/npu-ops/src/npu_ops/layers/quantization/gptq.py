"""Makes GPTQ checkpoints choose among the registered kernels, with activation order and zero points too.

vLLM's own configuration asks for Marlin, and refuses both.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod, set_weight_attrs
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQMoEMethod, get_moe_quant_method
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    flatten_list,
    get_dynamic_override,
    get_linear_quant_method,
)
from vllm.model_executor.parameter import (
    GroupQuantScaleParameter,
    PackedvLLMParameter,
    RowvLLMParameter,
)
from vllm.scalar_type import scalar_types

from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.quantization.experts import Integers, QuantizedExperts
from npu_ops.layers.quantization.weight_only import register_one_group, values_of
from npu_ops.layers.quantization.without_settings import EveryDtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.models.utils import WeightsMapper


class NpuGPTQLinearMethod(LinearMethodBase):
    """Parameters as GPTQ stores them, handed to the best registered kernel."""

    def __init__(self, quant_config: NpuGPTQConfig) -> None:
        """quant_config: with the layer's own overrides applied."""
        self.quant_config = quant_config

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register qweight int32 [K / pack, N], scales [groups, N], qzeros int32 [groups, N / pack], g_idx int32 [K].

        Raises ValueError for activation order split over ranks along the inputs.
        """
        config = self.quant_config
        inputs, outputs, pack = input_size_per_partition, sum(output_partition_sizes), config.pack_factor
        whole = config.group_size == -1 or config.group_size >= input_size
        self.has_order = config.desc_act and not whole
        if self.has_order and input_size != inputs:
            msg = (
                "GPTQ with activation order (desc_act) cannot be split along the inputs: "
                "serve with tensor_parallel_size=1."
            )
            raise ValueError(msg)
        kernel_config = MPLinearLayerConfig(
            full_weight_shape=(input_size, output_size),
            partition_weight_shape=(inputs, outputs),
            weight_type=config.quant_type,
            act_type=params_dtype,
            group_size=-1 if whole else config.group_size,
            zero_points=not config.is_sym,
        )
        kernel = choose_mp_linear_kernel(kernel_config)
        loader = {"weight_loader": extra_weight_attrs["weight_loader"]}
        packed = {"packed_factor": pack, **loader}
        weight = torch.empty(inputs // pack, outputs, dtype=torch.int32)
        layer.register_parameter(
            "qweight", PackedvLLMParameter(data=weight, input_dim=0, output_dim=1, packed_dim=0, **packed)
        )
        if whole:
            register_one_group(layer, outputs, pack, params_dtype, loader["weight_loader"])
        else:
            groups = inputs // config.group_size
            scales = torch.empty(groups, outputs, dtype=params_dtype)
            zeros = torch.empty(groups, outputs // pack, dtype=torch.int32)
            layer.register_parameter(
                "scales", GroupQuantScaleParameter(data=scales, input_dim=0, output_dim=1, **loader)
            )
            layer.register_parameter(
                "qzeros", PackedvLLMParameter(data=zeros, input_dim=0, output_dim=1, packed_dim=1, **packed)
            )
        # Without an order vLLM does not load it, but for models that keep no configuration of quantisation.
        order = torch.empty(inputs, dtype=torch.int32)
        layer.register_parameter(
            "g_idx", RowvLLMParameter(data=order, input_dim=0, weight_loader=_of_first_part(loader["weight_loader"]))
        )
        layer.zero_offset = config.zero_offset
        self.kernel = kernel(kernel_config, w_q_param_name="qweight", w_s_param_name="scales", w_zp_param_name="qzeros")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that groups are of one size, whatever their order, and let the kernel repack."""
        if self.has_order:
            found = layer.g_idx.data.sort().values
            if not torch.equal(found, torch.arange(len(found), device=found.device) // self.quant_config.group_size):
                msg = (
                    f"g_idx must name each group of {self.quant_config.group_size} inputs as often: "
                    "the checkpoint was quantised otherwise; quantise it again with one group size."
                )
                raise ValueError(msg)
        else:
            layer.g_idx = None  # the groups follow each other, or there is one
        self.kernel.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        return self.kernel.apply_weights(layer, x, bias)


class NpuGPTQExperts(QuantizedExperts, AutoGPTQMoEMethod):
    """AutoGPTQMoEMethod on `npu_ops::weight_only_experts`."""

    def __init__(self, quant_config: NpuGPTQConfig, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel, or what vLLM does not load."""
        self.begin(moe)
        self.quant_config, self.input_dtype = quant_config, None
        if quant_config.desc_act:
            msg = "GPTQ experts with activation order (desc_act) are not loaded by vLLM: quantise them without."
            raise UnsupportedLayerError(msg)

    def create_weights(self, layer: Any, num_experts: int, *sizes: Any, **more: Any) -> None:
        """As the base method, and a place for what a checkpoint may say of an order that it does not have.

        vLLM leaves that out, but for models that keep no configuration of quantisation.
        """
        super().create_weights(layer, num_experts, *sizes, **more)
        for name in ("w13_g_idx", "w2_g_idx"):
            order = nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
            set_weight_attrs(order, {"weight_loader": _not_loaded})
            layer.register_parameter(name, order)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: qweight int32 [E, K / pack, N], scales [E, groups, N], qzeros int32 [E, groups, N / pack]."""
        config = self.quant_config
        bits = config.quant_type.size_bits
        for name in ("w13_bias", "w2_bias"):  # vLLM has them for every model: those that no checkpoint filled are none
            if name not in layer._loaded_expert_biases:
                layer.register_parameter(name, None)

        def integers(name: str, expert: int) -> Integers:
            q, s, z = (getattr(layer, f"{name}_{part}").data[expert] for part in ("qweight", "scales", "qzeros"))
            zeros = None
            if not config.is_sym:
                zeros = values_of(z, bits).t().short() + config.zero_offset - (128 if bits == 8 else 0)
            values = values_of(q.t(), bits)
            values = values.view(torch.int8) ^ -128 if bits == 8 else values
            return Integers(values, s.t(), None if zeros is None else zeros.to(torch.int8))

        group = config.group_size
        self.pack_integers(layer, bits, group, lambda e: integers("w13", e), lambda e: integers("w2", e))


def _of_first_part(load: Callable[..., None]) -> Callable[..., None]:
    """Return a loader that takes what all parts of a fused layer have alike from the first.

    Where vLLM loads weights again it counts elements, and would take a layer for complete too early.
    """

    def load_first(param: Any, loaded_weight: Tensor, part: Any = None) -> None:
        first = part[0] if isinstance(part, tuple) else part  # a tuple: parts that are one in the checkpoint
        if first in (None, 0, "q"):
            load(param, loaded_weight, *(() if part is None else (part,)))

    return load_first


def _not_loaded(**_: Any) -> bool:
    """Take the place of a loader of weights; says that there was nothing for this rank."""
    return False


@register_quantization_config("auto_gptq")
class NpuGPTQConfig(EveryDtype, AutoGPTQConfig):
    """AutoGPTQConfig, whose linear layers take the registered kernel."""

    TYPE_MAP = AutoGPTQConfig.TYPE_MAP | {(4, False): scalar_types.uint4, (8, False): scalar_types.uint8}

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        desc_act: bool,
        is_sym: bool,
        lm_head_quantized: bool,
        dynamic: dict[str, dict[str, int | bool]],
        full_config: dict[str, Any],
        modules_in_block_to_quantize: list[str] | None = None,
    ) -> None:
        """As AutoGPTQConfig, which refuses desc_act with groups.

        Raises ValueError where rules for single modules turn the order of activations on or off.
        """
        rules = [rule for rule in (dynamic or {}).values() if isinstance(rule, dict)]
        if any(rule.get("desc_act", desc_act) != desc_act for rule in rules):
            msg = "GPTQ with desc_act for some modules only cannot be loaded: quantise all modules with one desc_act."
            raise ValueError(msg)
        super().__init__(
            weight_bits, group_size, False, is_sym, lm_head_quantized, {}, full_config, modules_in_block_to_quantize
        )
        self.dynamic = dynamic or {}
        self.desc_act = desc_act  # also with one group a row: a rule may have others

    @property
    def zero_offset(self) -> int:
        """What the zero points lack on disk: the first format stored them less one."""
        return 0 if self.full_config.get("checkpoint_format") == "gptq_v2" else 1

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer, quantised head or mixture of experts."""
        if isinstance(layer, RoutedExperts):
            projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            parts = [f"{prefix}.{expert}.{name}" for expert in range(layer.global_num_experts) for name in projections]
            return get_moe_quant_method(self, layer, self._as_rules_name(prefix, parts), NpuGPTQExperts)
        if isinstance(layer, LinearBase) and self._begins_as_another(prefix):
            return UnquantizedLinearMethod()
        name = self._as_rules_name(prefix, self._parts_of(prefix))
        return get_linear_quant_method(self, layer, name, NpuGPTQLinearMethod)

    def _as_rules_name(self, prefix: str, parts: list[str]) -> str:
        """Return the name by which rules for single modules (`dynamic`) mean a layer: that of its parts, or its own.

        vLLM asks for its own name only, `qkv_proj` or `experts`, which no checkpoint has, and which a rule for
        `v_proj` may match as well.
        """
        if all(get_dynamic_override(self, part) is None for part in parts):
            return prefix
        said = [self._said_of(part) for part in parts]
        if len({what and what[:-1] for what in said}) > 1:
            msg = (
                f"{prefix} is one layer to vLLM, and GPTQ's rules (dynamic) give its parts different bits or groups: "
                "quantise them alike."
            )
            raise UnsupportedLayerError(msg)
        # Symmetric parts have their zero points in the checkpoint, too.
        return next((part for part, what in zip(parts, said, strict=True) if what and not what[-1]), parts[0])

    def _said_of(self, name: str) -> tuple[Any, ...] | None:
        """Return how a module was rounded by the rules, symmetry last; None: not at all."""
        if get_dynamic_override(self, name) is False:
            return None
        base = {"bits": self.weight_bits, "group_size": self.group_size, "sym": self.is_sym}
        return tuple(get_dynamic_override(self, name, key, default) for key, default in base.items())

    def _parts_of(self, prefix: str) -> list[str]:
        before, dot, last = prefix.rpartition(".")
        return [f"{before}{dot}{part}" for part in self.packed_modules_mapping.get(last, [last])]

    def _begins_as_another(self, prefix: str) -> bool:
        """Say whether a layer is quantised to vLLM for a name alone that goes on where that of a quantised layer ends.

        Zamba 2's `gate_up_proj_adapter_list` is no `gate_up_proj`.
        """
        listed = flatten_list(self.modules_in_block_to_quantize)
        named = [(name, part) for name in listed for part in self._parts_of(prefix) if name in part]
        return bool(named) and not any(re.search(rf"{re.escape(name)}(?!\w)", part) for name, part in named)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Keep the order of activations where it matters."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper() if self.desc_act else super().get_checkpoint_weight_mapper()
