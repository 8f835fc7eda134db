"""Disaggregated prefill over TCP, without NIXL: the same proxy, two real servers, and what becomes of a dead one's blocks.

Which tokens are right, the decode server says by itself, for another tenant: with a ``cache_salt`` it finds nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.clients import process_of
from tests.support.disaggregated import PREFILL, PROMPTS, Pair, ask, prefill, serve_both, text
from tests.support.server import metric, until
from tests.support.stores import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server

BLOCKS = "vllm:kv_offload_tiering_chunk_hits_total"


@contextlib.contextmanager
def serve_pair(folder: Path, *, devices: tuple[int, int] = (1, 1), **more: Any) -> Iterator[Pair]:
    secret = folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    arguments, environs, ports = [], [], (free_port(), free_port())
    for count, port, peers in zip(devices, ports, ([], ["127.0.0.1"]), strict=True):
        place = {"host": "127.0.0.1", "port": port, "secret_file": str(secret), "peers": peers}
        tier = {"type": "p2p", "transport": "tcp", "deadline": 3.0, "revision": "demo"} | place
        extra = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]} | more
        transfer = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        # In float32, since requests that are computed together have other sums than one alone, and near ties differ.
        own = ["-tp", str(count), "--enforce-eager", "--dtype", "float32"]
        arguments.append(["--kv-transfer-config", json.dumps(transfer), *own])
        environs.append({"NPU_SIMULATOR_DEVICES": str(count), "NPU_SIMULATOR_MEMORY": "2GiB"})
    with serve_both(folder, *arguments, *environs) as pair:
        yield pair._replace(ports=ports)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serve_pair(tmp_path_factory.mktemp("pair")) as servers:
        yield servers


def alone(server: Server, prompt: str) -> str:
    """Return what a server says that has found nothing of the prompt anywhere."""
    return text(server, prompt, cache_salt=f"alone {time.monotonic_ns()}")


def fetched(server: Server) -> float:
    return metric(server, BLOCKS, tier="1:p2p_tcp")


def through(pair: Pair, prompt: str) -> str:
    return str(ask(pair.proxy, pair.decode.name, prompt)["choices"][0]["text"])


def check_tokens(pair: Pair, prompts: list[str]) -> None:
    before = fetched(pair.decode)
    answers = [through(pair, prompt) for prompt in prompts]
    assert fetched(pair.decode) - before > 4 * len(prompts)
    assert answers == [alone(pair.decode, prompt) for prompt in prompts]
    assert len(set(answers)) > 1


def test_tokens_are_those_of_one_server_and_the_blocks_were_sent(pair: Pair) -> None:
    check_tokens(pair, PROMPTS)
    sent = metric(pair.prefill, "vllm:npu_kv_p2p_sent_blocks_total")
    assert sent > 0 or until(
        lambda: bool(alone(pair.prefill, "1")) and metric(pair.prefill, "vllm:npu_kv_p2p_sent_blocks_total") > 0
    )
    assert metric(pair.decode, "vllm:npu_kv_p2p_failures_total") == 0
    assert metric(pair.decode, "vllm:kv_offload_recomputed_blocks_total") == 0


def test_a_prompt_that_the_prefill_server_has_already_is_sent_as_a_whole(pair: Pair) -> None:
    """Its blocks are on the device, or in the host tier, and are not computed again."""
    prompt = f"7 {PROMPTS[0]}"
    assert text(pair.prefill, prompt) == text(pair.prefill, prompt)
    check_tokens(pair, [prompt, f"{prompt} 5"])


def test_tenants_stay_apart(pair: Pair) -> None:
    prompt = f"8 {PROMPTS[0]}"
    params = prefill(pair, prompt)
    before = fetched(pair.decode)
    assert text(pair.decode, prompt, cache_salt="another's", kv_transfer_params=params) == alone(pair.decode, prompt)
    assert fetched(pair.decode) == before


def test_what_a_client_makes_up_costs_a_computation(pair: Pair) -> None:
    prompts = [f"{number} {PROMPTS[1]}" for number in range(100, 105)]
    params = prefill(pair, prompts[0])
    before = fetched(pair.decode)
    tries = [
        (prompts[1], params),  # of another prompt
        (prompts[2], params | {"remote_host": "198.51.100.1"}),
        (prompts[3], params | {"remote_request_id": "x"}),
        (prompts[4], params | {"remote_port": "5710"}),
        (prompts[4], PREFILL | {"remote_decoder": 7}),
    ]
    for prompt, made_up in tries:
        assert text(pair.decode, prompt, kv_transfer_params=made_up) == alone(pair.decode, prompt)
    # The first differs from what it claims to be in its first block already.
    assert fetched(pair.decode) == before


def source(pair: Pair) -> dict[str, Any]:
    """Return what names the prefill server as one that may have a prompt's blocks."""
    return {"remote_kv_source": {"kv_request_id": "any", "remote_host": "127.0.0.1", "remote_port": pair.ports[0]}}


def test_a_server_is_asked_for_what_it_computed_for_its_own_clients(pair: Pair) -> None:
    """It has no request then, and wakes for the question."""
    prompts = [f"{number} {PROMPTS[number % 4]}" for number in range(400, 404)]
    before, failures = fetched(pair.decode), metric(pair.decode, "vllm:npu_kv_p2p_failures_total")
    for prompt in prompts:
        wanted = text(pair.prefill, prompt)
        time.sleep(0.5)
        began = time.monotonic()
        assert text(pair.decode, prompt, kv_transfer_params=source(pair)) == wanted == alone(pair.decode, prompt)
        assert time.monotonic() - began < 20
    assert fetched(pair.decode) - before > 4 * len(prompts)
    assert metric(pair.decode, "vllm:npu_kv_p2p_failures_total") == failures


def test_what_the_asked_server_does_not_have_is_computed(pair: Pair) -> None:
    before = fetched(pair.decode)
    prompt = f"410 {PROMPTS[0]}"
    assert text(pair.decode, prompt, kv_transfer_params=source(pair)) == alone(pair.decode, prompt)
    text(pair.prefill, f"411 {PROMPTS[0]}")
    salted = text(pair.decode, f"411 {PROMPTS[0]}", cache_salt="another's", kv_transfer_params=source(pair))
    assert salted == alone(pair.decode, f"411 {PROMPTS[0]}")
    assert fetched(pair.decode) == before


def test_servers_without_requests_rest(pair: Pair) -> None:
    """Each has a tier that others may ask any moment; vLLM's own has its engine take steps for that, for ever."""
    prompt = f"420 {PROMPTS[0]}"
    assert text(pair.prefill, prompt) == text(pair.decode, prompt, kv_transfer_params=source(pair))
    engines = [psutil.Process(process_of(server, "EngineCore")) for server in (pair.prefill, pair.decode)]
    time.sleep(1)
    before = [sum(engine.cpu_times()[:2]) for engine in engines]
    time.sleep(4)
    spent = [sum(engine.cpu_times()[:2]) - then for engine, then in zip(engines, before, strict=True)]
    print(f"seconds of a processor in four: {spent}")
    assert max(spent) < 0.2


def test_many_at_once(pair: Pair) -> None:
    prompts = [f"{number} {PROMPTS[number % 4]}" for number in range(300, 316)]
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: through(pair, prompt), prompts))
    assert answers == [alone(pair.decode, prompt) for prompt in prompts]


def test_a_prefill_server_that_stalls_and_dies_costs_a_computation(pair: Pair) -> None:
    stalled, dead, gone, asked = (f"{number} {PROMPTS[2]}" for number in range(200, 204))
    text(pair.prefill, asked)
    params = {prompt: prefill(pair, prompt) for prompt in (stalled, dead)}
    wanted = {prompt: alone(pair.decode, prompt) for prompt in (stalled, dead, gone, asked)}
    os.killpg(pair.prefill.pid, signal.SIGSTOP)
    assert text(pair.decode, stalled, kv_transfer_params=params[stalled]) == wanted[stalled]
    with concurrent.futures.ThreadPoolExecutor(1) as client:
        answer = client.submit(text, pair.decode, dead, kv_transfer_params=params[dead])
        time.sleep(0.5)  # it has asked, and waits
        os.killpg(pair.prefill.pid, signal.SIGKILL)
        assert answer.result(60) == wanted[dead]
    assert through(pair, gone) == wanted[gone]
    assert text(pair.decode, asked, kv_transfer_params=source(pair)) == wanted[asked]
    assert until(lambda: bool(alone(pair.decode, "1")) and metric(pair.decode, "vllm:npu_kv_p2p_failures_total") > 0)


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [(1, 2), (2, 1)], ids=["one-to-two", "two-to-one"])
def test_servers_of_different_sizes(devices: tuple[int, int], tmp_path: Path) -> None:
    with serve_pair(tmp_path, devices=devices, canonical_layout=True) as pair:
        check_tokens(pair, PROMPTS)


@pytest.mark.nightly
def test_servers_of_different_sizes_without_a_common_layout_are_told_so(tmp_path: Path) -> None:
    with serve_pair(tmp_path, devices=(1, 2)) as pair:
        assert through(pair, PROMPTS[0]) == alone(pair.decode, PROMPTS[0])
        assert fetched(pair.decode) == 0
        assert "lets their parallel sizes differ" in (tmp_path / "decode" / "server.log").read_text()
