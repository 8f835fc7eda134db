"""How the bytes of a store are shared out: the most that its index takes, and how large its segments are."""

from __future__ import annotations

from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.durable.envelope import record_bytes
from npu_kvconnector.tiers.durable.files import PAGE

__all__ = ["map_bytes", "segment_bytes"]

_ENTRY_BYTES = 900  # of the index for a block, the free pages that a transaction needs among them
_LARGEST_SEGMENT = 256 * 2**20
_SHARES = 16  # segments that a store is made of, at least


def map_bytes(quota: int, block_bytes: int) -> int:
    """Return the most bytes of the index: for so many blocks as there can be of this size."""
    blocks = quota // record_bytes(block_bytes)
    return min(max(quota // 128, blocks * _ENTRY_BYTES, 4 * 2**20), 4 * 2**30) // PAGE * PAGE


def segment_bytes(budget: int, block_bytes: int, quota: int) -> int:
    """Return the bytes of a segment: a sixteenth of the store, but room for four blocks, and no more than 256 MiB."""
    record = record_bytes(block_bytes)
    size = min(max(budget // _SHARES, PAGE + 4 * record), max(_LARGEST_SEGMENT, PAGE + 4 * record)) // PAGE * PAGE
    if budget < 3 * size:
        least = 3 * (PAGE + 4 * record) + 8 * 2**20
        msg = f"bytes={quota} is too little for blocks of {block_bytes} bytes; give the tier at least {least}"
        raise OptionError(msg)
    return size
