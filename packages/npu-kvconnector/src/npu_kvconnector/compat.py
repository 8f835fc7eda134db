"""What vLLM 0.32 has no seam for; each function names the versions, the reason and its test."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

__all__ = ["recompute_failed_loads"]


def recompute_failed_loads(transfer: KVTransferConfig) -> None:
    """Set ``kv_load_failure_policy`` to "recompute" in the scheduler's own configuration.

    vLLM 0.32 and 0.33: the policy is the user's and by default "fail", which answers the client with an error. Here a
    load is an attempt to save work and never the only copy, so that there is no use for "fail". The scheduler reads the
    policy after it has made the connector, which has no other way to say so. Test: test_connector.py.
    """
    transfer.kv_load_failure_policy = "recompute"
