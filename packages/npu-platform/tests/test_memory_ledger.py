"""The ledger adds up what shares the host's memory, and says so before the system does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig

from npu_platform.memory_ledger import MemoryLedger, available_memory, host_memory, tier_bytes

GIB = 2**30
LEDGER = MemoryLedger(weights=GIB, cache=2 * GIB, device=4 * GIB, tier=3 * GIB, ranks=2, on_host=True, host=16 * GIB)


def test_ranks_and_the_tier_share_the_host() -> None:
    assert LEDGER.total == 11 * GIB
    assert LEDGER.text() == (
        "memory in GiB: weights 1.00, KV cache 2.00, rest of the device 1.00, host tier 3.00; "
        "of the host's 16.00 2 ranks and the tier take 11.00"
    )
    assert LEDGER.problem() is None


def test_a_device_with_memory_of_its_own_leaves_the_host_alone() -> None:
    assert replace(LEDGER, on_host=False, host=4 * GIB).problem() is None
    assert replace(LEDGER, on_host=False).total == 3 * GIB


def test_what_the_host_does_not_have_is_said_with_the_settings_to_lower() -> None:
    problem = replace(LEDGER, host=10 * GIB).problem()
    assert problem is not None
    assert "takes 11.00 GiB of a host with 10.00 GiB" in problem
    assert all(name in problem for name in ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "cpu_bytes_to_use"))


def test_available_memory_is_the_systems_and_never_more_than_there_is(tmp_path: Path) -> None:
    account = tmp_path / "meminfo"
    account.write_text("MemTotal: 99 kB\nMemAvailable:      64 kB\n")
    assert available_memory(account) == 64 << 10
    account.write_text(f"MemAvailable: {1 << 40} kB\n")
    assert available_memory(account) == host_memory()
    account.write_text("MemFree: 3 kB\n")
    assert available_memory(account) == 0
    assert 0 < available_memory() <= host_memory()


def test_bytes_of_the_tier_are_the_connectors() -> None:
    assert tier_bytes(None) == 0
    connector = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both"}
    assert tier_bytes(KVTransferConfig(**connector)) == 0
    for given in (GIB, str(GIB), "1GiB", "1024 MiB", "1.GiB"):
        assert tier_bytes(KVTransferConfig(**connector, kv_connector_extra_config={"cpu_bytes_to_use": given})) == GIB
    for given in ("1.2.3", ".", "GiB"):  # which the connector refuses, by its own sentence
        assert tier_bytes(KVTransferConfig(**connector, kv_connector_extra_config={"cpu_bytes_to_use": given})) == 0


@pytest.mark.parametrize(
    ("membership", "file"),
    [("0::/slice/engine\n", "slice/memory.max"), ("7:cpu,memory:/job\n0::/\n", "memory/job/memory.limit_in_bytes")],
    ids=["a slice of version 2", "version 1"],
)
def test_memory_is_what_control_groups_leave(membership: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text(membership)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("1073741824\n")
    assert host_memory(tmp_path / "membership", tmp_path) == 2**30
    (tmp_path / file).write_text("max\n" if file.endswith("max") else f"{2**63 - 4096}\n")
    assert host_memory(tmp_path / "membership", tmp_path) > 2**30
