"""P2PConfig: refusals that name the way out, and who may be read from."""

from __future__ import annotations

from typing import Any

import pytest

from npu_kvconnector.errors import OptionError
from npu_kvconnector.p2p.config import P2PConfig

WHOLE: dict[str, Any] = {"secret_file": "secret", "peers": ["10.0.0.7:5600"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"secret_file": None}, "openssl rand"),
        ({"peers": []}, "peers must list"),
        ({"peers": "10.0.0.7"}, "peers must list"),
        ({"peers": [7]}, "peers must be a list of names"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": "5"}, "deadline"),
        ({"bidirectional_kv_xfer": True}, "leave out"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, Any], message: str) -> None:
    options = {name: value for name, value in (WHOLE | change).items() if value is not None}
    with pytest.raises(OptionError, match=message):
        P2PConfig.parse(options, is_consumer=True)


def test_a_prefill_server_needs_no_peers_and_other_options_are_nixl_s() -> None:
    config = P2PConfig.parse({"secret_file": "secret", "kv_lease_duration": 10}, is_consumer=False)
    assert not config.allows("127.0.0.1", 5600)


@pytest.mark.parametrize(
    ("host", "port", "is_allowed"),
    [
        ("10.0.0.7", 5600, True),
        ("10.0.0.7", 5601, False),
        ("10.0.1.200", 1, True),
        ("10.0.2.1", 1, False),
        ("prefill.internal", 9, True),
        ("prefill.internal.evil.example", 9, False),
        ("", 0, False),
    ],
)
def test_peers_are_hosts_ports_and_networks(host: str, port: int, is_allowed: bool) -> None:
    config = P2PConfig(secret_file="secret", peers=("10.0.0.7:5600", "10.0.1.0/24", "prefill.internal"))
    assert config.allows(host, port) == is_allowed
