"""OffloadConfig: defaults, sizes, and refusals that name the way out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from npu_kvconnector.config import REFUSED, GuardConfig, OffloadConfig, parse_bytes
from npu_kvconnector.errors import KVConnectorError, OptionError


def test_nothing_is_required() -> None:
    assert OffloadConfig.parse({}) == OffloadConfig()


def test_every_option_is_read() -> None:
    options = {
        "cpu_bytes_to_use": 10**9,
        "block_size": 64,
        "eviction_policy": "Mine",
        "cache_policy_module_path": "my.module",
        "store_threshold": 2,
        "max_tracker_size": 100,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "canonical_layout": True,
        "secondary_tiers": [{"type": "fs", "root_dir": "/cache", "guard": {"load_seconds": 2}}],
        "backpressure": {"backpressure_cls": "EMABackpressureDetector"},
        "guard": {"failures": 3},
    }
    assert {field.name for field in dataclasses.fields(OffloadConfig)} == {*options, "blocks_per_chunk"}
    config = OffloadConfig.parse(options)
    assert config.for_vllm() == options
    assert config.for_vllm()["secondary_tiers"][0] is not options["secondary_tiers"][0]
    assert config.guard_of(options["secondary_tiers"][0]) == GuardConfig(failures=3, load_seconds=2)


def test_every_key_of_vllms_connector_is_accepted_or_refused_by_name() -> None:
    vllm = pytest.importorskip("vllm")
    root = Path(vllm.__file__).parent
    sources = [*(root / "v1" / "kv_offload").glob("*.py"), *(root / "v1" / "kv_offload" / "cpu").rglob("*.py")]
    sources += [root / "v1" / "kv_offload" / "tiering" / name for name in ("spec.py", "manager.py", "factory.py")]
    sources += (root / "distributed" / "kv_transfer" / "kv_connector" / "v1").glob("offloading*/**/*.py")
    read = re.compile(r"""extra_config(?:\.get\(|\[)\s*["'](\w+)["']""")
    keys = {key for source in sources for key in read.findall(source.read_text())}
    assert {"cpu_bytes_to_use", "secondary_tiers", "backpressure", "spec_name", "block_size"} <= keys
    assert keys <= {field.name for field in dataclasses.fields(OffloadConfig)} | REFUSED.keys()


@pytest.mark.parametrize(
    ("text", "number"),
    [(1024, 1024), (1e9, 10**9), ("4096", 4096), ("4GiB", 2**32), ("1.5 GB", 1_500_000_000), ("512mib", 2**29)],
)
def test_sizes(text: object, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("options", [[], [1], "x", None])
def test_what_is_no_object_is_refused(options: object) -> None:
    with pytest.raises(OptionError, match="kv_connector_extra_config must be an object"):
        OffloadConfig.parse(options)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "4 gallons", "-1", None, True, 1.5, [1], "9" * 400, float("inf"), float("nan")])
def test_wrong_sizes_are_refused(text: object) -> None:
    with pytest.raises(OptionError, match="cpu_bytes_to_use"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("cpu_bytes", "did you mean 'cpu_bytes_to_use'"),
        ("eviction-policy", "did you mean 'eviction_policy'"),
        ("x", "known are cpu_bytes_to_use"),
        ("spec_name", "this connector brings its own; name OffloadingConnector"),
        ("spec_module_path", "spec_module_path is refused"),
        ("sync_load_budget_bytes", "no step waits for a load here"),
        ("tier_poll_interval_s", "tiers are asked at each step"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(OptionError, match=hint):
        OffloadConfig.parse({key: 1})


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_bytes_to_use": 0},
        {"blocks_per_chunk": 0},
        {"blocks_per_chunk": True},
        {"blocks_per_chunk": "2"},
        {"store_threshold": -1},
        {"eviction_policy": "fifo"},
        {"offload_prompt_only": "no"},
        {"canonical_layout": 1},
        {"cache_policy_module_path": 1},
        {"blocks_per_chunk": 2, "block_size": 64},
        {"backpressure": True},
        {"secondary_tiers": {"type": "fs"}},
        {"secondary_tiers": [{"root_dir": "/cache"}]},
        {"guard": {"failures": 0}},
        {"guard": {"failures": 1.5}},
        {"guard": {"load_seconds": float("nan")}},
        {"guard": {"store_seconds": float("inf")}},
        {"guard": {"pending_share": 50}},
        {"guard": {"load_second": 1}},
        {"guard": 1},
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(KVConnectorError, match=next(iter(options))):
        OffloadConfig.parse(options)


@pytest.mark.parametrize("guard", [{"lookup_seconds": -1}, {"unknown": 1}, 3])
def test_a_tier_s_guard_is_checked(guard: object) -> None:
    with pytest.raises(OptionError, match="guard"):
        OffloadConfig.parse({"secondary_tiers": [{"type": "fs", "guard": guard}]})
