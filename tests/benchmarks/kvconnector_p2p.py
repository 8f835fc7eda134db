"""How soon a prompt answers that another server has computed: the part "p2p" of ``tests.benchmarks.kvconnector``.

Two ``vllm serve`` processes on this host, a prefill server and a decode server, with the p2p tier over TCP, and two with
NixlConnector behind our hardening, where NIXL is installed. Each prompt is computed by the prefill server first, as the
proxy has it done; then the decode server is asked for its first token. Beside that it is asked for prompts of the same
lengths that nobody has computed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx

from npu_platform.demo.server import Server
from tests.benchmarks.kvconnector_engine import prompt_of
from tests.support.disaggregated import COMPLETIONS, PREFILL
from tests.support.stores import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["between_servers"]

READY = 600.0
REPEATS = 2


def between_servers(folder: Path, model: Path, token_bytes: int, lengths: list[int]) -> str:
    """Measure every way that is installed and return the table.

    Args:
        folder: for what is made.
        model: its folder.
        token_bytes: bytes of a token's keys and values.
        lengths: of prompts, in tokens.
    """
    secret = folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    ways = {"p2p over TCP": over_tcp(secret, (max(lengths) + 4096) * token_bytes)}
    if importlib.util.find_spec("nixl"):
        ways["NIXL"] = over_nixl(secret)
    found: dict[str, dict[int, list[float]]] = {"computed": {length: [] for length in lengths}}
    for number, (name, (settings, environs)) in enumerate(ways.items()):
        found[name] = {length: [] for length in lengths}
        with servers(folder / f"pair-{number}", model, token_bytes, max(lengths), settings, environs) as (
            first,
            second,
        ):
            for repeat in range(REPEATS + 1):
                for length in lengths if repeat else lengths[:1]:  # the first is to warm
                    seed = 1000 * length + 10 * repeat + number
                    params = ask(first, prompt_of(length, seed), kv_transfer_params=PREFILL)["kv_transfer_params"]
                    transferred = first_token(second, prompt_of(length, seed), kv_transfer_params=params)
                    # Computing takes as long with each way: one is enough.
                    computed = first_token(second, prompt_of(length, seed + 5)) if number == 0 else None
                    if repeat:
                        found[name][length].append(transferred)
                        found["computed"][length] += [] if computed is None else [computed]
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return table(found, lengths, token_bytes)


def table(found: dict[str, dict[int, list[float]]], lengths: list[int], token_bytes: int) -> str:
    """Return seconds to the first token; in brackets how many times sooner than computing, and the bytes a second."""
    rows = [f"| prompt, tokens | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for length in lengths:
        computed = statistics.median(found["computed"][length])
        cells = [f"{computed:.3f}"]
        for name in list(found)[1:]:
            seconds = statistics.median(found[name][length])
            cells.append(f"{seconds:.3f} ({computed / seconds:.1f}; {length * token_bytes / seconds / 1e9:.2f} GB/s)")
        rows.append(f"| {length} | {' | '.join(cells)} |")
    return "\n".join(rows)


def over_tcp(secret: Path, host_bytes: int) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the settings of both servers for the p2p tier, and their environments."""
    settings = []
    for peers in ([], ["127.0.0.1"]):
        place = {"host": "127.0.0.1", "port": free_port(), "secret_file": str(secret), "peers": peers}
        tier = {
            "type": "p2p",
            "transport": "tcp",
            "deadline": 60.0,
            "revision": "bench",
            "bytes": host_bytes,
            "pending_bytes": host_bytes,
        } | place
        extra = {"cpu_bytes_to_use": host_bytes, "secondary_tiers": [tier], "guard": {"load_seconds": 60}}
        settings.append(
            {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        )
    return settings, [{}, {}]


def over_nixl(secret: Path) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the same for NPUNixlConnector."""
    settings, environs = [], []
    for role in ("kv_producer", "kv_consumer"):
        extra = {"secret_file": str(secret), "deadline": 60.0} | ({"peers": ["127.0.0.1"]} if settings else {})
        about = {"kv_connector": "NPUNixlConnector", "kv_role": role, "kv_connector_extra_config": extra}
        settings.append(about | {"kv_load_failure_policy": "recompute"})
        environs.append({"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())})
    return settings, environs


@contextlib.contextmanager
def servers(
    folder: Path,
    model: Path,
    token_bytes: int,
    longest: int,
    settings: list[dict[str, Any]],
    environs: list[dict[str, str]],
) -> Iterator[list[Server]]:
    """Serve twice until the block ends."""
    folder.mkdir()
    cache = 2 * (longest + 1024) * token_bytes
    with contextlib.ExitStack() as stack:
        both = []
        for number, (transfer, environ) in enumerate(zip(settings, environs, strict=True)):
            arguments = ["--skip-tokenizer-init", "--dtype", "bfloat16", "--max-model-len", str(longest + 64)]
            arguments += ["--max-num-batched-tokens", "2048", "--max-num-seqs", "4", "--no-enable-prefix-caching"]
            arguments += ["--kv-cache-memory-bytes", str(cache), "--kv-transfer-config", json.dumps(transfer)]
            if transfer["kv_connector"] != "NPUNixlConnector":  # its blocks have names by their hashes
                arguments.remove("--no-enable-prefix-caching")
            log = folder / f"server-{number}.log"
            one = Server(model, *arguments, log=log, name="bench", environment=os.environ | environ)
            both.append(stack.enter_context(one))
        for one in both:
            one.wait_until_ready(READY)
        yield both


def ask(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Return the answer of one token to a prompt."""
    body = {"model": server.name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "detokenize": False}
    answer = httpx.post(server.url + COMPLETIONS, json=body | more, timeout=READY, trust_env=False)
    if answer.status_code != 200:
        msg = f"a server answered {answer.status_code}: {answer.text}"
        raise RuntimeError(msg)
    result: dict[str, Any] = answer.json()
    return result


def first_token(server: Server, prompt: list[int], **more: Any) -> float:
    """Return the seconds to the first token."""
    began = time.perf_counter()
    ask(server, prompt, **more)
    return time.perf_counter() - began
