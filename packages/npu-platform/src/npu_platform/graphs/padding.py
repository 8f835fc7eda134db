"""Rows of padding that a replay leaves out: a graph is captured for so many rows, and a batch may have fewer tokens.

The kernels of npu-ops that go by tokens read at each replay how many there are. Other ops of a graph compute all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["counted", "goes_by_tokens"]


def goes_by_tokens(vllm_config: VllmConfig) -> bool:
    """Say whether what the model computes has a row for each token of the batch, and attention of npu-ops.

    Elsewhere something else may have as many rows as a batch (images, an encoder's states, heads), or the rows of
    other ranks come in between.
    """
    from npu_platform.attention import kernels

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model is None or model.runner_type != "generate":
        return False
    other_rows = model.is_multimodal_model or model.is_encoder_decoder or model.use_mla
    other_rows = other_rows or model.is_hybrid or model.is_attention_free
    alone = parallel.data_parallel_size == 1 and parallel.prefill_context_parallel_size == 1
    counts = hasattr(torch.ops.npu_ops, "_count_tokens")
    return counts and not other_rows and alone and kernels.native_attention(model.get_head_size())


@contextmanager
def counted(tokens: torch.Tensor, rows: int) -> Iterator[None]:
    """Let what is captured meanwhile, for batches of `rows` rows, read from `tokens` how many of them are tokens.

    tokens: one int32 on npu, which each step sets before it replays.
    """
    torch.ops.npu_ops._count_tokens(tokens, rows)
    try:
        yield
    finally:
        torch.ops.npu_ops._count_tokens(None, 0)
