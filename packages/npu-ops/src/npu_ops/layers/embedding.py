"""Gives vLLM's unquantized vocabulary layers the kernels: rows by token id, and the logits of the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from npu_ops.layers.linear import forget_weight, plain_bias, plain_weight, warm_up

ops = torch.ops.npu_ops


class NpuEmbeddingMethod(UnquantizedEmbeddingMethod):
    """UnquantizedEmbeddingMethod on the kernels; a tied head shares the embedding's memory."""

    npu_warm_up = staticmethod(warm_up)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Forget the memory that the weight had while it was loaded."""
        super().process_weights_after_loading(layer)
        forget_weight(layer)

    def npu_implementation(self) -> str:
        """Return the ops: logits of a head, rows of an embedding."""
        return "npu_ops::linear, npu_ops::embedding"

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits. x: [..., H]; returns [..., V]."""
        return ops.linear(x, plain_weight(layer), plain_bias(layer, bias))

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """input_: int [...]; returns [..., H]."""
        return ops.embedding(input_, plain_weight(layer))


class NpuVocabulary:
    """Mixin of the layer classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's layer, then swap the method that computes."""
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedEmbeddingMethod:
            self.quant_method = NpuEmbeddingMethod()


for _base in (VocabParallelEmbedding, ParallelLMHead):
    _base.register_oot(name=_base.__name__)(type(f"Npu{_base.__name__}", (NpuVocabulary, _base), {}))
