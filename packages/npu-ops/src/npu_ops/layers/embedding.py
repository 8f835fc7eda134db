"""Gives vLLM's unquantized vocabulary layers the kernels: rows by token id, and the logits of the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from npu_ops import panels
from npu_ops.config import OpsConfig
from npu_ops.layers.linear import forget_weight, plain_bias, plain_weight, warm_up
from npu_ops.layers.quantization.experts import WHOLE

ops = torch.ops.npu_ops

HEAD = ("npu_head_codes", "npu_head_scales")
"""Buffers of a head whose weights are rounded to 8 bits."""
_ROUNDED = 8


class NpuEmbeddingMethod(UnquantizedEmbeddingMethod):
    """UnquantizedEmbeddingMethod on the kernels; a tied head shares the embedding's memory."""

    npu_warm_up = staticmethod(warm_up)

    def __init__(self, *, may_be_head: bool, rounds: bool) -> None:
        """Compute logits, if they may be asked for, with the weights as they are, or rounded to 8 bits when loaded."""
        super().__init__()
        self.may_be_head = may_be_head
        self.rounds = may_be_head and rounds
        self._embedding: nn.Module | None = None

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Share the embedding's weight, and its codes where it has some: new weights reach the embedding alone."""
        tied: nn.Module = super().tie_weights(layer, embed_tokens)
        if getattr(getattr(embed_tokens, "quant_method", None), "rounds", False):  # it may be torch's, as Whisper's is
            self._embedding = embed_tokens
        return tied

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Forget the memory that the weight had while it was loaded; round a head to 8 bits where that is asked for."""
        super().process_weights_after_loading(layer)
        forget_weight(layer)
        if self.rounds and self._embedding is None:
            for name, tensor in zip(HEAD, panels.pack_rounded(plain_weight(layer)), strict=True):
                layer.register_buffer(name, tensor, persistent=False)

    def npu_implementation(self) -> str:
        """Return the ops: logits of a head, rows of an embedding."""
        logits = "npu_ops::weight_only_linear (int8 by channel)" if self.rounds else "npu_ops::linear"
        return f"{logits}, npu_ops::embedding"

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits. x: [..., H]; returns [..., V]."""
        if self.rounds:
            codes, scales = (getattr(self._embedding or layer, name) for name in HEAD)
            return ops.weight_only_linear(
                x, codes, scales, None, None, plain_bias(layer, bias), len(plain_weight(layer)), WHOLE
            )
        return ops.linear(x, plain_weight(layer), plain_bias(layer, bias))

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """input_: int [...]; returns [..., H]."""
        return ops.embedding(input_, plain_weight(layer))


def _may_be_head(layer: object) -> bool:
    """Whether logits may be asked of it: of an embedding where the model's head is tied to one."""
    config = get_current_vllm_config_or_none()
    model = config.model_config if config is not None else None
    if isinstance(layer, ParallelLMHead):
        return True
    if getattr(model, "runner_type", None) == "pooling":
        return False
    return getattr(getattr(model, "hf_text_config", None), "tie_word_embeddings", False)


_WHOLE = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
"""What computes with a whole table: ModelOpt's checkpoints name the second for heads that they leave out."""


class NpuVocabulary:
    """Mixin of the layer classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's layer, then swap the method that computes."""
        super().__init__(*args, **kwargs)
        if type(self.quant_method) in _WHOLE:
            rounds = OpsConfig.from_environment().head_bits == _ROUNDED
            self.quant_method = NpuEmbeddingMethod(may_be_head=_may_be_head(self), rounds=rounds)


for _base in (VocabParallelEmbedding, ParallelLMHead):
    _base.register_oot(name=_base.__name__)(type(f"Npu{_base.__name__}", (NpuVocabulary, _base), {}))
