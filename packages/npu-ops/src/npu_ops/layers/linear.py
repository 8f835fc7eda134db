"""Gives vLLM's unquantized linear layers the kernel.

vLLM hard-wires UnquantizedLinearMethod, so the layer classes are replaced, and swap that method, and only that one,
for ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from npu_ops import choices

ops = torch.ops.npu_ops

_MATRIX = 2


def plain(parameter: Tensor) -> Tensor:
    """The parameter's tensor without its class: vLLM's parameters run Python for each torch call that sees them."""
    return parameter.data.as_subclass(torch.Tensor)


def plain_weight(layer: nn.Module) -> Tensor:
    """`plain(layer.weight)`, remembered for as long as the layer has the same parameter with the same memory."""
    return _remembered(layer, "_npu_ops_weight", layer.weight)  # type: ignore[arg-type]


def plain_bias(layer: nn.Module, bias: Tensor | None) -> Tensor | None:
    """The same of the bias that vLLM hands to the layer's method; None where there is none."""
    return None if bias is None else _remembered(layer, "_npu_ops_bias", bias)


def forget_weight(layer: nn.Module) -> None:
    """Drop what is remembered: the parameters may have got other memory."""
    for name in ("_npu_ops_weight", "_npu_ops_bias"):
        layer.__dict__.pop(name, None)


def _remembered(layer: nn.Module, name: str, parameter: Tensor) -> Tensor:
    memo = layer.__dict__.get(name)
    if memo is not None and memo[0] is parameter:
        return memo[1]
    tensor = plain(parameter)
    layer.__dict__[name] = (parameter, tensor)
    return tensor


def warm_up(layers: list[nn.Module], rows: int) -> None:
    """Measure our linear against torch's for these layers and up to `rows` rows; npu-platform's worker calls it."""
    for layer in layers:
        plain_weight(layer)  # torch.compile cannot trace how these are made
        plain_bias(layer, getattr(layer, "bias", None))
    weights = [plain_weight(layer) for layer in _multiplied(layers)]
    # vLLM keeps the weights of convolutions in linear layers, with a dimension more; and on meta those of layers that a
    # model is without when it sorts or embeds texts
    choices.measure([weight for weight in weights if weight.dim() == _MATRIX and not weight.is_meta], rows)


def _multiplied(layers: list[nn.Module]) -> list[nn.Module]:
    """Leave out tables that rows are only looked up in: they are large, and what may be spent on measuring is little.

    Logits come from a table that a head is tied to, or where the model has no head beside it.
    """
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    tied = {id(head.weight) for head in heads}

    def looked_up(layer: nn.Module) -> bool:
        if not isinstance(layer, VocabParallelEmbedding) or isinstance(layer, ParallelLMHead):
            return False
        return id(layer.weight) not in tied if heads else not layer.quant_method.may_be_head

    return [layer for layer in layers if not looked_up(layer)]


class NpuLinearMethod(UnquantizedLinearMethod):
    """UnquantizedLinearMethod on the kernel; weights stay as the checkpoint stores them, so a reload needs nothing."""

    npu_warm_up = staticmethod(warm_up)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Forget the memory that the weight had while it was loaded."""
        super().process_weights_after_loading(layer)
        forget_weight(layer)

    def npu_implementation(self) -> str:
        """Return the op."""
        return "npu_ops::linear"

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        return ops.linear(x, plain_weight(layer), plain_bias(layer, bias))


class NpuLinear:
    """Mixin of the layer classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's layer, then swap the method that computes."""
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = NpuLinearMethod()


class StandsFor(type):
    """The class of the layer classes: one of them has every instance of the class of vLLM that it stands for.

    vLLM's adapters ask by npu's class whether they may wrap a layer, and some are of vLLM's or a user's own subclass.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        """Say whether this is a layer of the class, or of what it stands for."""
        base = cls.__dict__.get("stands_for")
        return super().__instancecheck__(instance) or (base is not None and isinstance(instance, base))


@ReplicatedLinear.register_oot(name="ReplicatedLinear")
class NpuReplicatedLinear(NpuLinear, ReplicatedLinear, metaclass=StandsFor):
    """ReplicatedLinear on the kernel."""

    stands_for = ReplicatedLinear


for _base in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear):
    _made = StandsFor(f"Npu{_base.__name__}", (NpuLinear, _base), {"stands_for": _base})
    _base.register_oot(name=_base.__name__)(_made)
