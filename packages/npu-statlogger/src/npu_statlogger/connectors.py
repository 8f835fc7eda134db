"""How the statistics of a connector become figures: names of vLLM's metrics where a connector uses them.

vLLM ships each step's payload as plain data: self-describing ({"types", "data"}: the offloading connectors, by tier),
lists of observations (NIXL and others), or one such payload per connector of several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_statlogger.metrics import labelled

if TYPE_CHECKING:
    from npu_statlogger.fold import Batch

__all__ = ["Payloads", "fold_connectors", "own_payloads"]

Payloads = tuple[Any, Any]
"""Of the KV connector and of the encoder cache's; None for one that said nothing."""

_NIXL = {
    "transfer_duration": ("nixl_xfer_time_seconds",),
    "post_duration": ("nixl_post_time_seconds",),
    "bytes_transferred": ("nixl_bytes_transferred",),
    "num_descriptors": ("nixl_num_descriptors",),
    # As vLLM groups them: a failed handshake or notification is a failed transfer too.
    "num_failed_transfers": ("nixl_num_failed_transfers",),
    "num_failed_handshakes": ("nixl_num_failed_transfers",),
    "num_failed_notifications": ("nixl_num_failed_transfers", "nixl_num_failed_notifications"),
    "num_kv_expired_reqs": ("nixl_num_kv_expired_reqs",),
    "num_notifications_after_expiry": ("nixl_num_notifications_after_expiry",),
}
_NIXL_SPREADS = {"transfer_duration", "post_duration", "bytes_transferred", "num_descriptors"}


def own_payloads(stats: Any) -> Payloads | None:
    """Return copies of what the connectors say in a SchedulerStats, None if they say nothing.

    vLLM's own log adds later payloads to the first one in place (KVConnectorLogging.observe), so that a reference kept
    for a while would count them twice. tests/test_connectors.py shows it.
    """
    kv = getattr(stats, "kv_connector_stats", None)
    ec = getattr(stats, "ec_connector_stats", None)
    return (_copy(kv), _copy(ec)) if kv or ec else None


def fold_connectors(batch: Batch, payloads: Payloads, time: float) -> None:
    """Add the payloads of one step; what is neither a number nor a list of numbers is left out."""
    for payload, prefix in zip(payloads, ("kv_connector", "ec_connector"), strict=True):
        _fold(batch, payload, time, prefix)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return list(value) if isinstance(value, list) else value


def _fold(batch: Batch, payload: Any, time: float, prefix: str) -> None:
    """Add one payload; `prefix` begins the names of observations whose connector gives them none of vLLM's."""
    if not isinstance(payload, dict):
        return
    if "types" in payload and "data" in payload:
        _fold_described(batch, payload["types"], payload["data"], time)
        return
    nixl = "transfer_duration" in payload and "post_duration" in payload
    for name, value in payload.items():
        if isinstance(value, dict):
            _fold(batch, value, time, f"{prefix}_{name}")
        elif isinstance(value, list) and nixl and name in _NIXL:
            _fold_nixl(batch, name, value)
        elif isinstance(value, list):
            _fold_list(batch, _plain(name, prefix), value)
        elif isinstance(value, int | float):
            batch.gauge(_plain(name, prefix), value, time)


def _fold_described(batch: Batch, types: Any, data: Any, time: float) -> None:
    for name, by_label in data.items():
        for labels, value in by_label.items():
            key = labelled(name.removeprefix("vllm:").removesuffix("_total"), *labels)
            match types.get(name):
                case "counter":
                    batch.count(key, value)
                case "gauge":
                    batch.gauge(key, value, time)
                case "histogram":
                    batch.add(key, value)


def _fold_nixl(batch: Batch, field: str, values: list[Any]) -> None:
    for name in _NIXL[field]:
        if field in _NIXL_SPREADS:
            batch.add(name, values)
        else:
            batch.count(name, sum(values))


def _fold_list(batch: Batch, name: str, values: list[Any]) -> None:
    """Add observations; records of several fields (Mooncake's) give one distribution for each of their numbers."""
    batch.add(name, [value for value in values if isinstance(value, int | float)])
    for record in values:
        if isinstance(record, dict):
            for field, value in record.items():
                if isinstance(value, int | float):
                    batch.add(f"{name}_{field}", [value])


def _plain(name: str, prefix: str) -> str:
    return name.removeprefix("vllm:") if name.startswith("vllm:") else f"{prefix}_{name}"
