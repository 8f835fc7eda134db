"""What npu-kvconnector saves and costs: ``python -m tests.benchmarks.kvconnector [PART ...]``.

copy: bytes a second between device and host tier, beside a plain copy of the same bytes on the host, and on CUDA beside
one between pinned memory and the device. engine: Qwen3-0.6B's shape with random weights. One engine computes prompts and
stores them in the host tier and in every tier behind it; then one with each tier alone finds them there (fs is vLLM's
own; remote is a Valkey on this host). Beside that: prompts that never come back, and the time between tokens of a request
while the prompt of another is loaded, without a connector, with each tier and with ``--peer`` with vLLM's own connector,
on devices that it knows. new: the same prompts that never come back, but with all engines up at once and asked in turns
(``tests.benchmarks.kvconnector_new``), which is the figure to trust; answers: so, too, but with long answers to short
prompts. bad: throughput when a tier misbehaves
(``tests.benchmarks.kvconnector_bad``). p2p: the first token of a prompt that another server has computed, over TCP and over
NIXL (``tests.benchmarks.kvconnector_p2p``). late: how late blocks are durable beside a busy engine
(``tests.benchmarks.kvconnector_late``). Each engine is a process of its own. ``--quick``: one round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.checkpoint import write_model, write_shape
from tests.benchmarks.engine_cases import QWEN3_06B, QWEN3_8B
from tests.benchmarks.kvconnector_bad import BEHAVIOURS, first_word, misbehaving
from tests.benchmarks.kvconnector_engine import NEW_ANSWER, NEW_PROMPTS, NEW_TOKENS, OURS, in_a_process, not_long
from tests.benchmarks.kvconnector_late import delays
from tests.benchmarks.kvconnector_new import ANSWERS, PROMPTS, Turns, new_prompts
from tests.benchmarks.kvconnector_p2p import CONTESTANTS, REPEATS, between_servers
from tests.benchmarks.machine import machine
from tests.benchmarks.results import abba

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, PAGE, BLOCKS = 28, 65_536, 512  # Qwen3-0.6B: 8,192 tokens in blocks of 16, bfloat16
CHUNK = 8  # blocks
PARTS = ("copy", "engine", "new", "answers", "bad", "p2p", "late")
HOST = "host"
TIERS = ("fs", "durable", "remote")
SHAPES = {"Qwen3-0.6B": QWEN3_06B, "Qwen3-8B": QWEN3_8B}
PEER = "OffloadingConnector"
PATIENT = {"load_seconds": 120, "store_seconds": 120, "pending_share": 1.0}
"""Of the guard: a prompt of 32,768 tokens is one load of 3.8 GB."""


def main() -> None:
    """Measure what is asked for, all by default, and print the tables."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.kvconnector", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768], help="of prompts, in tokens")
    parser.add_argument("--rounds", type=int, default=3, help="engines of each kind (default 3)")
    parser.add_argument("--quick", action="store_true", help="one engine of each kind")
    names = (HOST, *TIERS)
    parser.add_argument(
        "--tiers", nargs="*", default=list(names), choices=names, help="host: alone, the others behind it"
    )
    parser.add_argument("--pairs", type=int, help="turns of each engine in new, answers and p2p (default: 4 minutes)")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS, help="of p2p")
    kinds = [first_word(name) for name in BEHAVIOURS][1:]
    parser.add_argument("--bad", nargs="*", default=kinds, choices=kinds, help="how tiers behave in the part bad")
    parser.add_argument("--plain", action="store_true", help="deadlines and queues of the tiers as they are by default")
    parser.add_argument("--layers", type=int, help="fewer for a trial")
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=SHAPES, help="of the model (default Qwen3-0.6B)")
    parser.add_argument("--peer", action="store_true", help="vLLM's own connector as well, with its host tier")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # with the servers and engines that it has started
    options.rounds = 1 if options.quick else options.rounds
    parts = options.parts or list(PARTS)
    if not {*parts} <= {*PARTS}:
        parser.error(f"parts are {', '.join(PARTS)}, not {' '.join(parts)}")
    print(f"Machine: {machine()}", flush=True)
    if "copy" in parts:
        print(f"\n### Between device and host tier\n\n{copies()}", flush=True)
    if {*PARTS[1:]} & {*parts}:
        place = Path.cwd() / ".nox"  # a disk, where /tmp may be memory
        place.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as folder:
            contest = Contest(Path(folder), options)
            if "engine" in parts:
                contest.run()
            if "new" in parts:
                print(f"\n### Prompts that hit nothing\n\n{contest.new(PROMPTS)}", flush=True)
            if "answers" in parts:
                print(f"\n### Long answers\n\n{contest.new(ANSWERS)}", flush=True)
            if "bad" in parts:
                model = contest.folder / "model"
                table = misbehaving(contest.folder, model, contest.token_bytes, contest.rounds, options.bad)
                print(f"\n### When a tier misbehaves\n\n{table}", flush=True)
            if "p2p" in parts:
                model, short, repeats = contest.folder / "model", not_long(contest.lengths), options.pairs or REPEATS
                ways = options.contestants
                table = between_servers(contest.folder, model, contest.token_bytes, short, ways, repeats)
                print(f"\n### From another server\n\n{table}", flush=True)
            if "late" in parts:
                tier = {"type": "durable", "path": str(contest.folder / "late"), "bytes": 8 * 2**30}
                table = delays(str(contest.folder / "model"), tier, contest.token_bytes, contest.engine)
                print(f"\n### How late blocks are durable\n\n{table}")


def copies() -> str:
    """Return a table of bytes a second, in whole rows and in blocks that lie anywhere."""
    import numpy as np
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from npu_kvconnector.tiers.host import HostRegion
    from npu_kvconnector.worker import HostTierWorker

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    memory = torch.ones(LAYERS, BLOCKS, PAGE, dtype=torch.int8, device=device)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(layer, PAGE) for layer in memory],
        [[CanonicalKVCacheRef(number, PAGE) for number in range(LAYERS)]],
    )
    row = LAYERS * PAGE
    one, other = torch.ones(2, BLOCKS * row, dtype=torch.int8).unbind()
    plain = BLOCKS * row / best(lambda: other.copy_(one)) / 1e9
    bus = f"; {between_pinned(memory)}" if device.type == "cuda" else ""
    shuffled = np.random.default_rng(0).permutation(BLOCKS)
    orders = {
        "in a row": (1, range(BLOCKS), range(BLOCKS)),
        "anywhere": (1, shuffled, shuffled[::-1]),
        f"in a row, {CHUNK} a chunk": (CHUNK, range(BLOCKS), range(BLOCKS // CHUNK)),
    }
    rows = [
        f"Device {device}; a copy on the host: {plain:.1f} GB/s{bus}",
        "",
        "| blocks | store, GB/s | load, GB/s | of the copy |",
        "|---|---|---|---|",
    ]
    for name, (per_chunk, blocks, chunks) in orders.items():
        size = row * per_chunk
        region = HostRegion(
            f"bench-{uuid.uuid4()}",
            num_chunks=BLOCKS // per_chunk,
            rank=0,
            kv_bytes_per_chunk=size,
            cpu_page_size=size,
        )
        worker = HostTierWorker(caches, region, blocks_per_chunk=per_chunk)
        on_device, on_host = GPULoadStoreSpec(list(blocks), [BLOCKS], [0]), CPULoadStoreSpec(list(chunks))
        rates = [
            BLOCKS * row / best(lambda: finished(worker, submit, *specs)) / 1e9  # noqa: B023
            for submit, specs in (
                (worker.submit_store, (on_device, on_host)),
                (worker.submit_load, (on_host, on_device)),
            )
        ]
        rows.append(f"| {name} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[0] / plain:.0%}, {rates[1] / plain:.0%} |")
        worker.shutdown()
    return "\n".join(rows)


def between_pinned(memory: Any) -> str:
    """Return what one copy of device memory to pinned memory, and back, gives."""
    import torch

    pinned = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
    rates = []
    for target, source in ((pinned, memory), (memory, pinned)):

        def copy(target: Any = target, source: Any = source) -> None:
            target.copy_(source, non_blocking=True)
            torch.accelerator.synchronize()

        rates.append(memory.numel() / best(copy) / 1e9)
    return f"one to pinned memory: {rates[0]:.1f} GB/s, from it: {rates[1]:.1f} GB/s"


def finished(worker: Any, submit: Any, source: Any, target: Any) -> None:
    """Carry a job out."""
    submit(1, source, target)
    worker.wait({1})
    (ended,) = worker.get_finished()
    assert ended.success


def best(call: Callable[[], object]) -> float:
    """Return the least seconds of several calls, after one to warm up."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times[1:])


class Contest:
    """The engines of one run: which tiers they have, what was measured, and the tables of it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        """Make the model; the tiers lie below ``folder``."""
        self.folder, self.lengths, self.rounds = folder, sorted(options.lengths), options.rounds
        self.engine, self.peer, self.plain = options.engine, options.peer, options.plain
        shape = dict(SHAPES[options.shape])
        shape["num_hidden_layers"] = layers = options.layers or shape["num_hidden_layers"]
        write = write_shape if self.engine.get("load_format") == "dummy" else write_model
        write(folder / "model", shape)
        # keys and values in bfloat16
        self.token_bytes = layers * 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2
        self.tiers: dict[str, dict[str, Any]] = {}
        self._names, self._pairs = options.tiers, options.pairs
        self.results: dict[str, list[dict[str, list[Any]]]] = {}

    def run(self) -> None:
        """Run every engine and print the tables."""
        self._open_tiers()
        self._measure("all", list(self.tiers.values()), self.lengths, ["computed", "host"], seed=0)
        # Without a connector the longest is not computed again: that is minutes.
        short = not_long(self.lengths)
        turns = ["none", "host", *([PEER] if self.peer else []), *self.tiers]
        for number in range(self.rounds):
            for name in abba(turns, number):
                seed = 1 + number * len(turns) + turns.index(name)
                if name == "none":
                    self._measure(name, None, short, ["new", "computed"], seed)
                elif name in {"host", PEER}:
                    self._measure(name, [], short[-1:], ["new", "computed", "host", "gaps"], seed)
                else:
                    self._measure(name, [self.tiers[name]], self.lengths, ["new", "tier", "gaps"], seed)
        print(f"\n### Seconds to the first token\n\n{self._first_tokens()}")
        print(f"\n### What others notice\n\n{self._costs()}")

    def new(self, turns: Turns) -> str:
        """Return the table of engines that are up at once."""
        turns = dataclasses.replace(turns, pairs=self._pairs or turns.pairs)
        extra: dict[str, Any] = {"cpu_bytes_to_use": 2 * turns.work * self.token_bytes}
        extra |= {} if self.plain else {"guard": PATIENT}
        engines: dict[str, dict[str, Any] | None] = {"none": None}
        if HOST in self._names:
            engines[HOST] = extra | {"secondary_tiers": []}
        self._open_tiers()
        engines |= {f"host, {name}": extra | {"secondary_tiers": [tier]} for name, tier in self.tiers.items()}
        return new_prompts(str(self.folder / "model"), engines, self.token_bytes, turns, self.engine)

    def _open_tiers(self) -> None:
        self.tiers = self.tiers or {name: self._tier(name) for name in self._names if name != HOST}

    def _tier(self, name: str) -> dict[str, Any]:
        """Return a tier's options; with the remote one its store is started."""
        place = self.folder / name
        size = int(2 * sum(self.lengths) * self.token_bytes) + 2**30
        if name == "fs":
            return {"type": "fs", "root_dir": str(place)}
        if name == "durable":
            return {"type": "durable", "path": str(place), "bytes": size}
        from tests.support.stores import ValkeyServer

        place.mkdir()
        store = ValkeyServer(place, memory=size)
        store.start()  # it is killed when this process ends
        patient = {"deadline": 120.0, "lookup_deadline": 10.0, "pending_bytes": size}
        return {"type": "remote", "url": store.url} | ({} if self.plain else patient)

    def _measure(
        self, name: str, tiers: list[dict[str, Any]] | None, lengths: list[int], parts: list[str], seed: int
    ) -> None:
        """Run an engine and keep what it has measured."""
        began = time.monotonic()
        longest = max(lengths)
        # the device's cache, and all that waits for the tiers behind
        host = (longest + 4096) * self.token_bytes
        extra: dict[str, Any] = {"cpu_bytes_to_use": host}
        if name != PEER:
            extra |= {"secondary_tiers": tiers, "guard": PATIENT}
        found = in_a_process(
            model=str(self.folder / "model"),
            extra=None if tiers is None else extra,
            lengths=lengths,
            longest=longest,
            block_bytes=self.token_bytes,
            seed=seed,
            parts=parts,
            engine=self.engine,
            connector=PEER if name == PEER else OURS,
        )
        self.results.setdefault(name, []).append(found)
        print(f"{name}: {', '.join(parts)} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def _all(self, name: str, case: str) -> list[Any]:
        return [one for run in self.results.get(name, []) for one in run.get(case, [])]

    def _first_tokens(self) -> str:
        peer = [PEER] if self.peer else []
        columns = ["computed", "host", *peer, *self.tiers]
        rows = [f"| prompt, tokens | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for length in self.lengths:
            case = f"computed {length}"
            computed = statistics.median(self._all("none", case) or self._all("all", case))
            figures = [f"{computed:.3f}", hits(self._all("all", f"host {length}"), computed)]
            figures += [hits(self._all(name, f"host {length}"), computed) for name in peer]
            figures += [hits(self._all(name, f"tier {length}"), computed) for name in self.tiers]
            rows.append(f"| {length} | {' | '.join(figures)} |")
        computing = "with the connector" if len(self._all("none", f"computed {self.lengths[-1]}")) == 0 else "without"
        rows += [
            "",
            f"Medians; in brackets how many times faster than computing. The longest was computed {computing}.",
        ]
        return "\n".join(rows)

    def _costs(self) -> str:
        work = NEW_PROMPTS * (NEW_TOKENS + NEW_ANSWER)
        new = f"{NEW_PROMPTS} new prompts of {NEW_TOKENS} tokens, {NEW_ANSWER} more each: tokens/s"
        gaps = "ms between tokens alone | while a prompt is loaded | times | longest"
        rows = [f"| tiers | {new} | of none | {gaps} |", "|---" * 7 + "|"]
        none = statistics.median(self._all("none", "new"))
        for name in [each for each in ("none", "host", PEER, *self.tiers) if self.results.get(each)]:
            seconds = statistics.median(self._all(name, "new"))
            cells = [f"host, {name}" if name in self.tiers else name]
            cells += [f"{work / seconds:.0f}", f"{none / seconds:.3f}"]
            quiet, loading = self._all(name, "quiet"), self._all(name, "loading")
            if quiet and loading:
                alone, beside = statistics.mean(quiet) * 1000, statistics.mean(loading) * 1000
                cells += [f"{alone:.1f}", f"{beside:.1f} (of {len(loading)})", f"{beside / alone:.2f}"]
                cells += [f"{max(loading) * 1000:.1f}"]
            rows.append(f"| {' | '.join(cells + [''] * (7 - len(cells)))} |")
        return "\n".join(rows)


def hits(found: list[tuple[float, float]], computed: float) -> str:
    """Return the median, how many times it is faster, and the share of the prompt that was loaded if not nearly all."""
    if not found:
        return ""
    seconds, share = statistics.median(one[0] for one in found), min(one[1] for one in found)
    part = f", {share:.0%} loaded" if share < 0.97 else ""
    return f"{seconds:.3f} ({computed / seconds:.1f}{part})"


if __name__ == "__main__":
    main()
