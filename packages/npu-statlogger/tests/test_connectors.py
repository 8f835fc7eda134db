"""Statistics of vLLM's connectors: their own classes make the payloads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.metrics.stats import SchedulerStats

from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.connectors import fold_connectors, own_payloads
from npu_statlogger.fold import Batch
from npu_statlogger.reading import read_snapshots
from npu_statlogger.recorder import Recorder
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path


def folded(payload: object, **more: object) -> Batch:
    batch = Batch()
    payloads = own_payloads(SchedulerStats(kv_connector_stats=payload, **more))
    if payloads is not None:
        fold_connectors(batch, payloads, 7.0)
    return batch


def offloading() -> OffloadingConnectorStats:
    types = {"load_bytes": "counter", "load_time": "counter", "load_size": "histogram", "tiering_read_bytes": "counter"}
    types |= {"cpu_cache_usage_perc": "gauge"}
    data = {
        "load_bytes": {(): 4096},
        "load_time": {(): 0.25},
        "load_size": {(): [1024, 3072]},
        "tiering_read_bytes": {("fs",): 5, ("obj",): 6},
        "cpu_cache_usage_perc": {(): 0.5},
    }
    named = {f"vllm:kv_offload_{name}": kind for name, kind in types.items()}
    return OffloadingConnectorStats({"types": named, "data": {f"vllm:kv_offload_{k}": v for k, v in data.items()}})


def nixl() -> NixlKVConnectorStats:
    stats = NixlKVConnectorStats()
    stats.record_transfer(SimpleNamespace(xferDuration=2e6, postDuration=1e6, totalBytes=100, descCount=3))
    stats.record_failed_handshake()
    stats.record_failed_notification()
    return stats


def test_an_offloading_connector_by_tier_under_vllm_s_names() -> None:
    batch = folded(offloading().to_dict())
    assert batch.counters["kv_offload_load_bytes"] == 4096
    assert batch.totals_nano["kv_offload_load_time"] == 250_000_000
    assert batch.values["kv_offload_load_size"] == [1024, 3072]
    assert batch.counters["kv_offload_tiering_read_bytes.fs"] == 5
    assert batch.counters["kv_offload_tiering_read_bytes.obj"] == 6
    assert batch.gauges["kv_offload_cpu_cache_usage_perc"] == (7, 0.5)


def test_nixl_under_vllm_s_names_and_grouping() -> None:
    batch = folded(nixl().to_dict())
    assert batch.values["nixl_xfer_time_seconds"] == [2]
    assert batch.values["nixl_bytes_transferred"] == [100]
    assert batch.counters["nixl_num_failed_transfers"] == 2
    assert batch.counters["nixl_num_failed_notifications"] == 1
    assert "nixl_num_kv_expired_reqs" not in batch.counters


def test_several_connectors_at_once() -> None:
    both = MultiKVConnectorStats({"OffloadingConnector": offloading(), "NixlConnector": nixl()})
    batch = folded(both.to_dict())
    assert batch.counters["kv_offload_load_bytes"] == 4096
    assert batch.counters["nixl_num_failed_transfers"] == 2


def test_records_of_several_fields_give_a_distribution_each() -> None:
    batch = folded({"get": [{"status": "ok", "duration_seconds": 0.5, "num_keys": 3}]})
    assert batch.values["kv_connector_get_duration_seconds"] == [0.5]
    assert batch.values["kv_connector_get_num_keys"] == [3]


@pytest.mark.parametrize("payload", [None, {}, [], {"name": "text"}, {"name": None}])
def test_what_holds_no_numbers_leaves_no_trace(payload: object) -> None:
    assert [name for name in folded(payload).values if name.startswith("kv_connector")] == []


def test_an_encoder_connector_has_names_of_its_own() -> None:
    batch = folded(None, ec_connector_stats={"load_seconds": [0.5, 1.0], "in_flight": 3})
    assert batch.values["ec_connector_load_seconds"] == [0.5, 1]
    assert batch.gauges["ec_connector_in_flight"] == (7, 3)


def test_what_vllm_s_log_adds_to_a_payload_later_is_not_counted_twice(path: Path) -> None:
    theirs = KVConnectorLogging(None)
    theirs.connector_cls = OffloadingConnector
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    first = SchedulerStats(kv_connector_stats=offloading().to_dict())
    for stats in (first, SchedulerStats(kv_connector_stats=offloading().to_dict())):
        recorder.put(stats, None, None)
        theirs.observe(stats.kv_connector_stats)
    grown = first.kv_connector_stats["data"]["vllm:kv_offload_load_size"][()]
    assert len(grown) == 4, "vLLM leaves payloads alone: own_payloads can go"
    recorder.close()
    (line,) = (line for line in read_snapshots(path) if isinstance(line, Snapshot))
    assert line.counters["kv_offload_load_bytes"] == 2 * 4096
    assert line.distributions["kv_offload_load_size"].count == 4
    assert line.total("kv_offload_load_time") == 0.5
