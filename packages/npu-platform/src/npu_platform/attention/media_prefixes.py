"""Images whose tokens see each other, as in Gemma 3 and PaliGemma: what of a step they are, and their attention.

The mask of such a token at q, of an image from a to b, is (causal and window) or [a, b]. An image is not longer than a
window, or is cut by it (vLLM sees to either), so this is the range that ends at b and begins where the window of q
does: attention that is not causal, of a request that ends at b. So the kernels compute each image as one more request,
after the causal pass, and its rows replace those of that pass. Mask: Beyer et al. 2024 (PaliGemma), prefix-LM masking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["MediaPrefixes", "media_prefixes"]


@dataclass
class MediaPrefixes:
    """The images of one step, each a request of its own; all tensors are on the device."""

    rows: torch.Tensor
    """int64 [tokens]: the places of their tokens in the batch."""
    query_start_loc: torch.Tensor
    """int32 [images + 1]: the first of each image's rows."""
    seq_lens: torch.Tensor
    """int32 [images]: how many tokens of its request each image ends after."""
    block_table: torch.Tensor
    """int32 [images, blocks]."""


def media_prefixes(common: CommonAttentionMetadata) -> MediaPrefixes | None:
    """Return the images that have tokens in this step, or None where there are none."""
    if not common.mm_req_doc_ranges or not any(common.mm_req_doc_ranges.values()):
        return None
    pieces = list(_pieces(common))
    if not pieces:
        return None
    device = common.seq_lens.device
    requests, firsts, ends, counts = (torch.tensor(column) for column in zip(*pieces, strict=True))
    rows = torch.cat([torch.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)])
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return MediaPrefixes(
        rows=rows.to(device),
        query_start_loc=starts.int().to(device),
        seq_lens=ends.int().to(device),
        block_table=common.block_table_tensor[requests.to(device)],
    )


def _pieces(common: CommonAttentionMetadata) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each image its request, its first row in the batch, the length that it ends at, and its count of rows.

    Lengths are upper bounds where tokens are drafted, which is behind all images: those end up before the step.
    """
    starts = common.query_start_loc_cpu.tolist()
    lengths = _on_the_host(common).tolist()
    for request, ranges in _in_order(common):
        new = starts[request + 1] - starts[request]
        computed = lengths[request] - new
        for first, last in ranges:
            begin, end = max(first, computed), min(last + 1, lengths[request])
            if end - begin > 1:  # the last token of an image sees all of it anyway
                yield request, starts[request] + begin - computed, end, end - begin


def _in_order(common: CommonAttentionMetadata) -> Iterable[tuple[int, list[tuple[int, int]]]]:
    return sorted((common.mm_req_doc_ranges or {}).items())


def _on_the_host(common: CommonAttentionMetadata) -> torch.Tensor:
    """Return the length of each request after this step, int32 [requests]."""
    bound = common.seq_lens_cpu_upper_bound
    return common.seq_lens.cpu() if bound is None else bound
