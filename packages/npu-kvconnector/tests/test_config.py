"""OffloadConfig: defaults, sizes, and refusals that name the way out."""

from __future__ import annotations

import dataclasses

import pytest

from npu_kvconnector.config import OffloadConfig, parse_bytes
from npu_kvconnector.errors import KVConnectorError, OptionError


def test_nothing_is_required() -> None:
    assert OffloadConfig.parse({}) == OffloadConfig()


def test_every_option_is_read() -> None:
    options = {
        "cpu_bytes_to_use": 10**9,
        "blocks_per_chunk": 4,
        "eviction_policy": "arc",
        "store_threshold": 2,
        "offload_prompt_only": False,
    }
    assert dataclasses.asdict(OffloadConfig.parse(options)) == options


@pytest.mark.parametrize(
    ("text", "number"),
    [(1024, 1024), (1e9, 10**9), ("4096", 4096), ("4GiB", 2**32), ("1.5 GB", 1_500_000_000), ("512mib", 2**29)],
)
def test_sizes(text: object, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "4 gallons", "-1", None, True, 1.5, [1]])
def test_wrong_sizes_are_refused(text: object) -> None:
    with pytest.raises(OptionError, match="cpu_bytes_to_use"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("cpu_bytes", "did you mean 'cpu_bytes_to_use'"),
        ("eviction-policy", "did you mean 'eviction_policy'"),
        ("spec_name", "known are cpu_bytes_to_use"),
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
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(KVConnectorError, match=next(iter(options))):
        OffloadConfig.parse(options)
