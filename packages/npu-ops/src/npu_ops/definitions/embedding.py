"""Rows of a table by index."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from npu_ops.op import define


def _shape(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@define("embedding(Tensor ids, Tensor weight) -> Tensor", _shape)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids: int [...], weight: [V, H]. Returns [..., H].

    An index outside the table raises in the reference; the native kernels, which may be replayed from a graph, give
    a row of NaN.
    """
    return F.embedding(ids, weight)
