"""How soon a prompt answers that another server has computed: the part "p2p" of ``tests.benchmarks.kvconnector``.

Two ``vllm serve`` processes on this host, a prefill server and a decode server, with the p2p tier over TCP, and two with
NixlConnector behind our hardening, where NIXL is installed, one pair after the other: NIXL's take processors while nobody
asks them anything. Each prompt is computed by the prefill server first, as the proxy has it done; then the decode server is
asked for its first token. Beside that it is asked for prompts of the same lengths that nobody has computed, in turns, every
other one backwards.
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
from tests.benchmarks.results import abba
from tests.support.disaggregated import COMPLETIONS, PREFILL
from tests.support.stores import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["CONTESTANTS", "REPEATS", "between_servers"]

CONTESTANTS = ("p2p", "nixl")
COMPUTED = "computed"
READY = 600.0
REPEATS = 2


def between_servers(
    folder: Path, model: Path, token_bytes: int, lengths: list[int], contestants: list[str], repeats: int
) -> str:
    """Measure every way that is asked for and installed, and return the table.

    Args:
        folder: for what is made.
        model: its folder.
        token_bytes: bytes of a token's keys and values.
        lengths: of prompts, in tokens.
        contestants: of ``CONTESTANTS``.
        repeats: prompts of each length and way.
    """
    secret = folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    ways = {}
    if "p2p" in contestants:
        ways["p2p over TCP"] = over_tcp(secret, (max(lengths) + 4096) * token_bytes)
    if "nixl" in contestants and importlib.util.find_spec("nixl"):
        ways["NIXL"] = over_nixl(secret)
    found = {}
    for number, (name, (settings, environs)) in enumerate(ways.items()):
        with servers(folder / f"pair-{number}", model, token_bytes, max(lengths), settings, environs) as pair:
            for one in pair:
                one.wait_until_ready(READY)
            found[name] = in_turns(pair, name, lengths, repeats)
    return table(found, lengths, token_bytes)


def in_turns(pair: list[Server], name: str, lengths: list[int], repeats: int) -> dict[str, dict[int, list[float]]]:
    """Return the seconds of both ways to a first token, by length; the first prompts are to warm."""
    turns = [COMPUTED, name]
    found: dict[str, dict[int, list[float]]] = {way: {length: [] for length in lengths} for way in turns}
    for repeat in range(repeats + 1):
        for length in lengths if repeat else lengths[:1]:
            for way in abba(turns, repeat):
                prompt = prompt_of(length, 1000 * length + 10 * repeat + turns.index(way))
                seconds = asked_after(*pair, prompt, is_known=way != COMPUTED)
                found[way][length] += [seconds] if repeat else []
                print(f"{way}, {length} tokens: {seconds:.3f} s", file=sys.stderr, flush=True)
    return found


def asked_after(first: Server, second: Server, prompt: list[int], *, is_known: bool) -> float:
    """Return the seconds to the decode server's first token, of a prompt that the prefill server knows or nobody does."""
    if not is_known:
        return first_token(second, prompt)
    params = ask(first, prompt, kv_transfer_params=PREFILL)["kv_transfer_params"]
    return first_token(second, prompt, kv_transfer_params=params)


def table(found: dict[str, dict[str, dict[int, list[float]]]], lengths: list[int], token_bytes: int) -> str:
    """Return seconds to the first token; in brackets how many times sooner than computing, and the bytes a second."""
    titles = [title for name in found for title in ("computed", name)]
    rows = [f"| prompt, tokens | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for length in lengths:
        cells = []
        for name, ways in found.items():
            computed, seconds = (statistics.median(ways[way][length]) for way in (COMPUTED, name))
            rate = length * token_bytes / seconds / 1e9
            cells += [f"{computed:.3f}", f"{seconds:.3f} ({computed / seconds:.1f}; {rate:.2f} GB/s)"]
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
    """Serve twice until the block ends; they need not be ready yet."""
    folder.mkdir()
    cache = (longest + 2048) * token_bytes
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
