"""A served engine and the tiers of its KV cache: killed and served again on what it left behind; faults and figures."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from npu_kvconnector.commands.stores import summarize
from tests.e2e.test_faults import process_of
from tests.support.server import metric, serve_demo, until
from tests.support.stores import S3Server, free_port

if TYPE_CHECKING:
    from npu_platform.demo.server import Server

PROMPT = " ".join(f"{number} plus {number + 1} is {2 * number + 1}." for number in range(60)) + " 5 plus 6 is"
TIERS = {"fs": {"root_dir": "{}"}, "durable": {"path": "{}", "bytes": 1 << 28}}


def connector(tier: dict[str, Any]) -> tuple[str, str]:
    extra = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
    transfer = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return "--kv-transfer-config", json.dumps(transfer)


def ask(server: Server, **more: Any) -> str:
    answer = server.ask("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=16, **more)
    return answer["choices"][0]["text"]


def written(server: Server) -> float:
    return metric(server, "vllm:kv_offload_tiering_write_bytes_total")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", TIERS)
def test_a_killed_server_s_prefixes_are_hits_of_the_next(kind: str, tmp_path: Path) -> None:
    if kind == "durable" and importlib.util.find_spec("npu_kvconnector.tiers.durable") is None:
        pytest.skip("this tree has no durable tier")
    place = str(tmp_path / "tier")
    tier = {"type": kind} | {
        name: value.format(place) if isinstance(value, str) else value for name, value in TIERS[kind].items()
    }
    before = set(Path("/dev/shm").iterdir())
    with serve_demo(tmp_path, *connector(tier)) as server:
        first = ask(server)
        assert until(lambda: written(server) > 0)
        stored = written(server)
        until(lambda: written(server) > stored, 2)
        os.kill(process_of(server, "EngineCore"), signal.SIGKILL)
        assert until(lambda: not server.processes_alive())
    assert not {file for file in set(Path("/dev/shm").iterdir()) - before if file.name.startswith("vllm_offload")}
    (tmp_path / "again").mkdir()
    with serve_demo(tmp_path / "again", *connector(tier)) as server:
        assert ask(server) == first
        assert metric(server, "vllm:external_prefix_cache_hits_total") > 0
        assert metric(server, "vllm:kv_offload_tiering_chunk_hits_total", tier=f"1:{kind}") > 0
        assert metric(server, "vllm:kv_offload_tiering_read_bytes_total") > 0


@pytest.mark.nightly
def test_a_server_answers_whatever_its_tier_does_and_shows_it(tmp_path: Path) -> None:
    guard = {"failures": 1, "open_seconds": 60}
    tier = {"type": "FlakyTier", "module_path": "tests.support.flaky_tier", "bad_lookup": 1, "guard": guard}
    root = str(Path(__file__).parents[2])
    with serve_demo(tmp_path, *connector(tier), PYTHONPATH=root) as server:
        assert len({ask(server) for _ in range(4)}) == 1
        # the state is shipped with the next step
        assert until(
            lambda: bool(ask(server)) and metric(server, "vllm:kv_offload_tiering_breaker_state", operation="load") == 2
        )
        assert metric(server, "vllm:kv_offload_tiering_failed_calls_total", call="lookup") == 1
        assert metric(server, "vllm:kv_offload_tiering_breaker_state", operation="store") == 0


@pytest.mark.nightly
def test_vllm_s_object_tier_brings_prefixes_to_another_server(tmp_path: Path) -> None:
    nixl = pytest.importorskip("nixl", reason="vLLM's tier goes through it: pip install npu-kvconnector[nixl]")
    # NIXL's plugin for CUDA 13 wants a library that no package index has; the same for CUDA 12 does without.
    plugins = next(Path(nixl.__file__).parents[1].glob(".nixl_cu12*/plugins"), None)
    if plugins is None:
        pytest.skip("NIXL's build for CUDA 12 is not installed: pip install nixl-cu12")
    s3 = S3Server(tmp_path)
    s3.start()
    s3.make_bucket("blocks")
    keys = {"access_key": "test", "secret_key": "test", "region": "us-east-1"}
    place = {"bucket": "blocks", "endpoint_override": s3.endpoint, "scheme": "http"}
    guard = {"load_seconds": 60, "lookup_seconds": 20, "store_seconds": 60}
    tier = {"type": "obj", "store_config": place | keys, "guard": guard}
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    environ = {"NIXL_PLUGIN_DIR": str(plugins), "NIXL_TELEMETRY_ENABLE": "y"}  # the tier asks how long a transfer took
    with serve_demo(folders[0], *connector(tier), **environ) as server:
        answer = ask(server)
        assert until(lambda: written(server) > 0)
    with serve_demo(folders[1], *connector(tier), **environ) as server:
        assert ask(server) == answer
        assert metric(server, "vllm:kv_offload_tiering_chunk_hits_total", tier="1:obj") > 0
    s3.kill()


@pytest.mark.nightly
def test_vllm_s_p2p_tier_reads_what_another_server_has(tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="vLLM's tier goes through it: pip install npu-kvconnector[nixl]")
    ports, folders = [free_port(), free_port()], [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    patient = {"lookup_seconds": 20}  # NIXL's first handshake takes longer than half a second on a busy machine
    first, second = (
        serve_demo(folder, *connector({"type": "p2p", "port": port, "guard": patient}))
        for folder, port in zip(folders, ports, strict=True)
    )
    with first as one, second as two:
        answer = ask(one)
        source = {"kv_request_id": "transfer-1", "remote_host": "localhost", "remote_port": ports[0]}
        assert ask(two, kv_transfer_params={"remote_kv_source": source}) == answer
        assert metric(two, "vllm:external_prefix_cache_hits_total") > 0
        assert ask(one) == answer


@pytest.mark.nightly
def test_two_servers_share_a_folder_and_another_tenant_sees_nothing_of_it(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "tenant")]
    for folder in folders:
        folder.mkdir()
        (folder / "secret").write_text(8 * folder.name)
        (folder / "secret").chmod(0o600)
    place = {"type": "durable", "path": str(tmp_path / "tier"), "bytes": 1 << 28}
    secrets = [folders[0] / "secret", folders[0] / "secret", folders[2] / "secret"]
    with contextlib.ExitStack() as servers:
        one, two, tenant = (
            servers.enter_context(serve_demo(folder, *connector(place | {"secret_file": str(secret)})))
            for folder, secret in zip(folders, secrets, strict=True)
        )
        answer = ask(one)
        assert until(lambda: summarize(tmp_path / "tier")["blocks"] > 0)
        assert ask(two) == answer
        found = metric(two, "vllm:external_prefix_cache_hits_total")
        assert found > 0
        assert ask(two, cache_salt="another's") == ask(tenant) == answer
        assert metric(two, "vllm:external_prefix_cache_hits_total") == found
        assert metric(tenant, "vllm:external_prefix_cache_hits_total") == 0
