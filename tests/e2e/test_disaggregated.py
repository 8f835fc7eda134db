"""Disaggregated prefill over NIXL: a server goes on from the blocks of a prompt that another one computed.

Two servers stand behind the proxy. Which tokens are right, the decode server says by itself: it caches no prefixes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.disaggregated import (
    COMPLETIONS,
    PREFILL,
    PROMPTS,
    TOKENS,
    Pair,
    ask,
    hits,
    prefill,
    serve_both,
    text,
)
from tests.support.stores import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("nixl")


def transfer_config(role: str, **more: Any) -> str:
    return json.dumps({"kv_role": role, "kv_load_failure_policy": "recompute", **more})


@contextlib.contextmanager
def serve_pair(
    folder: Path, connector: dict[str, Any], *more: str, devices: tuple[int, int] = (1, 1)
) -> Iterator[Pair]:
    """Start both servers at a time, and the proxy."""
    arguments, environs = [], []
    for role, count in zip(("kv_producer", "kv_consumer"), devices, strict=True):
        options = dict(connector)
        if "extra" in options:
            extra = options.pop("extra")
            options["kv_connector_extra_config"] = extra | ({"peers": ["127.0.0.1"]} if role == "kv_consumer" else {})
        environs.append(
            {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "NPU_SIMULATOR_DEVICES": str(count),
                "NPU_SIMULATOR_MEMORY": "2GiB",
            }
        )
        own = ["--kv-transfer-config", transfer_config(role, **options), "-tp", str(count), "--enforce-eager", *more]
        arguments.append([*own, *(["--no-enable-prefix-caching"] if role == "kv_consumer" else [])])
    with serve_both(folder, *arguments, *environs) as pair:
        yield pair


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, secret: Path) -> Iterator[Pair]:
    ours = {"kv_connector": "NPUNixlConnector", "extra": {"secret_file": str(secret), "deadline": 2.0}}
    with serve_pair(tmp_path_factory.mktemp("pair"), ours) as servers:
        yield servers


def check_tokens(pair: Pair) -> None:
    """Compare what comes through the proxy with what the decode server computes alone, and see that blocks were read."""
    before = hits(pair.decode)
    answers = [ask(pair.proxy, pair.decode.name, prompt)["choices"][0]["text"] for prompt in PROMPTS]
    assert hits(pair.decode) - before > 4 * 64
    assert answers == [text(pair.decode, prompt) for prompt in PROMPTS]
    assert len(set(answers)) > 1


def test_tokens_are_those_of_one_server(pair: Pair) -> None:
    check_tokens(pair)


def test_answers_stream_through_the_proxy(pair: Pair) -> None:
    body = {"model": pair.decode.name, "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    lines = httpx.post(pair.proxy + COMPLETIONS, json=body | {"stream": True}, timeout=60, trust_env=False).text
    events = [json.loads(line.removeprefix("data: ")) for line in lines.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text(pair.decode, PROMPTS[0])


def test_only_signed_parameters_are_followed(pair: Pair) -> None:
    """What a client makes up, changes, sends twice or sends with another prompt leads to a computation, and no read."""
    prompts = [f"{number} {PROMPTS[1]}" for number in range(100, 105)]
    params = prefill(pair, prompts[0])
    before = hits(pair.decode)
    tries = [
        (prompts[1], {k: v for k, v in params.items() if k != "npu_ticket"}),
        (prompts[2], params),  # for another prompt
        (prompts[0], params | {"remote_host": "198.51.100.1"}),
        (prompts[0], params | {"remote_block_ids": [[0, 1]]}),
        (prompts[3], PREFILL | {name: params[name] for name in params if name.startswith("remote_")}),
    ]
    for prompt, made_up in tries:
        assert text(pair.decode, prompt, kv_transfer_params=made_up) == text(pair.decode, prompt)
    assert hits(pair.decode) == before
    fresh = prompts[4]
    good = prefill(pair, fresh)
    assert text(pair.decode, fresh, kv_transfer_params=good) == text(pair.decode, fresh)
    assert hits(pair.decode) > before


def test_a_prefill_server_that_stalls_or_dies_costs_a_computation(pair: Pair) -> None:
    stalled, dead, gone = (f"{number} {PROMPTS[2]}" for number in range(200, 203))
    params = {prompt: prefill(pair, prompt) for prompt in (stalled, dead)}
    os.killpg(pair.prefill.pid, signal.SIGSTOP)
    try:
        assert text(pair.decode, stalled, kv_transfer_params=params[stalled]) == text(pair.decode, stalled)
    finally:
        os.killpg(pair.prefill.pid, signal.SIGCONT)
    os.killpg(pair.prefill.pid, signal.SIGKILL)
    assert text(pair.decode, dead, kv_transfer_params=params[dead]) == text(pair.decode, dead)
    assert ask(pair.proxy, pair.decode.name, gone)["choices"][0]["text"] == text(pair.decode, gone)


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [(1, 2), (2, 1)], ids=["one-to-two", "two-to-one"])
def test_servers_of_different_sizes(devices: tuple[int, int], tmp_path: Path, secret: Path) -> None:
    """In float32: sums over two ranks are rounded in another order, and a tie of this model's tokens may go either way."""
    ours = {"kv_connector": "NPUNixlConnector", "extra": {"secret_file": str(secret)}}
    with serve_pair(tmp_path, ours, "--dtype", "float32", devices=devices) as pair:
        check_tokens(pair)


@pytest.mark.nightly
@pytest.mark.parametrize("buffer", ["npu", "cpu"])
def test_vllm_s_own_connector(buffer: str, tmp_path: Path) -> None:
    with serve_pair(tmp_path, {"kv_connector": "NixlConnector", "kv_buffer_device": buffer}) as pair:
        check_tokens(pair)
