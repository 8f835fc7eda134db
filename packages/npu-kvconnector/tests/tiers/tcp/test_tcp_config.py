"""The options of the p2p tier over TCP, and which transport a p2p tier gets."""

from __future__ import annotations

from typing import Any

import pytest

from npu_kvconnector.config import OffloadConfig
from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.tcp import config as tcp_config
from npu_kvconnector.tiers.tcp.config import TcpConfig, choose_transport

SECRET = {"secret_file": "f"}


def tiers_of(*tiers: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = OffloadConfig.parse({"secondary_tiers": list(tiers), **more}).for_vllm()[
        "secondary_tiers"
    ]
    return result


@pytest.fixture(params=[True, False], ids=["nixl", "no-nixl"])
def is_there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(tcp_config, "has_nixl", lambda: request.param)
    return bool(request.param)


def test_sizes_and_peers_are_read() -> None:
    config = TcpConfig.parse(SECRET | {"bytes": "2GiB", "pending_bytes": "1MiB", "peers": ["10.0.0.0/24", "p:1"]})
    assert (config.bytes, config.pending_bytes) == (2**31, 2**20)
    assert config.access.allows("10.0.0.7", 5)
    assert config.access.allows("p", 1)
    assert not config.access.allows("p", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs secret_file"),
        ({"deadlin": 1}, "did you mean 'deadline'"),
        ({"deadline": 0}, "deadline"),
        ({"bytes": "many"}, "bytes must be"),
        ({"bytes": 0}, "bytes"),
        ({"port": 70_000}, "from 1 to 65535"),
        ({"port": True}, "port"),
        ({"host": "0.0.0.0"}, "name this server's address"),
        ({"host": 7}, "host must be a text"),
        ({"peers": "10.0.0.7"}, "peers must be a list"),
        ({"peers": [7]}, "peers must be a list"),
        ({"unbound_store_timeout_s": -1}, "unbound_store_timeout_s"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 1_000_000}, "num_threads must be .* from 1 to 64"),
        ({"deadline": float("nan")}, "deadline must be a number"),
        ({"unbound_store_timeout_s": float("inf")}, "unbound_store_timeout_s must be a number"),
        ({"peers": 5}, "peers must be a list"),
        ({"backends": ["UCX"]}, '"transport": "nixl"'),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TcpConfig.parse(options if not options else SECRET | options)


def test_without_a_word_it_is_nixl_where_that_is_installed_and_else_tcp(is_there: bool) -> None:
    (plain,) = tiers_of({"type": "p2p", "port": 1}) if is_there else tiers_of({"type": "p2p", "port": 1} | SECRET)
    assert plain["type"] == ("p2p" if is_there else "p2p_tcp")
    if not is_there:
        with pytest.raises(OptionError, match=r"secret_file.*npu-kvconnector\[nixl\]"):
            tiers_of({"type": "p2p"})


def test_tcp_is_used_where_it_is_asked_for(is_there: bool) -> None:
    for tier in ({"type": "p2p", "transport": "tcp"}, {"type": "p2p_tcp"}):
        (options,) = tiers_of(tier | SECRET)
        assert options["type"] == "p2p_tcp"
        assert "transport" not in options
        with pytest.raises(OptionError, match="needs secret_file"):
            tiers_of(tier)


def test_nixl_that_was_asked_for_is_there_or_both_ways_out_are_named(is_there: bool) -> None:
    tier = {"type": "p2p", "transport": "nixl", "num_threads": 2}
    if is_there:
        assert tiers_of(tier) == [{"type": "p2p", "num_threads": 2}]
        return
    with pytest.raises(OptionError, match=r'npu-kvconnector\[nixl\].*"transport": "tcp"'):
        tiers_of(tier)


def test_a_secret_is_never_taken_for_what_does_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_config, "has_nixl", lambda: True)
    with pytest.raises(OptionError, match=r'secret_file.*"transport": "tcp"'):
        tiers_of({"type": "p2p"} | SECRET)


def test_another_transport_is_refused() -> None:
    with pytest.raises(OptionError, match='"nixl" or "tcp"'):
        tiers_of({"type": "p2p", "transport": "udp"})


def test_other_tiers_stay_as_they_are() -> None:
    tier = {"type": "fs", "root_dir": "/x"}
    assert choose_transport(tier, {}) == tier


def test_how_long_the_guard_waits_follows_from_the_deadline_unless_the_user_says() -> None:
    tier = {"type": "p2p_tcp", "deadline": 40.0} | SECRET
    assert tiers_of(tier)[0]["guard"] == {"lookup_seconds": 41.0, "load_seconds": 41.0}
    own = tier | {"guard": {"lookup_seconds": 3}}
    assert tiers_of(own, guard={"load_seconds": 2})[0]["guard"] == {"lookup_seconds": 3, "load_seconds": 2}
