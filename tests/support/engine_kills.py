"""Kills engines while their durable tier stores, and compares every block that is left with a recomputation.

``python -m tests.support.engine_kills FOLDER --kills 100 --seed 1 --lost 5 --lanes 2 [--seconds 400]``; FOLDER is made, and
removed at the end. A lane is a store and the engines that are killed on it one after the other. Each ``--lost``-th
kill takes the page cache too: the store becomes what a power cut may leave of it (``tests.support.crash``), and the next
engine starts on that. After each kill a fresh reader opens a copy of the store. The engines are batch-invariant, so that a
block's bytes do not depend on what was computed beside it or loaded before it: a block must have those of an engine
that was asked for each prompt alone, and an answer the tokens of an engine without a connector.

The last line of the output is JSON: see :class:`Outcome`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from npu_kvconnector.tiers.durable.store import DurableStore
from tests.support import models
from tests.support.crash import build_shim, play, read_journal
from tests.support.forks import ForkServer
from tests.support.vllm_process import AS_MODULE, IMPORTS, PASSIVE

if TYPE_CHECKING:
    from tests.support.forks import Fork

__all__ = ["Outcome", "kill_engines"]

PROMPTS, LENGTH, NEW, BLOCK = 200, 72, 9, 16
"""Prompts that may be asked for; four whole blocks of each, and one that ends with what was generated."""
LARGE, SMALL = 96 * 2**20, 12 * 2**20
"""Quotas: for all blocks, and one by which blocks go all the time, of every third store."""
LONGEST = 1.0  # seconds of stores before a kill
FULL = 0.6  # of the blocks: the next store begins, so that there is something to store
KILLS_OF_A_STORE = 12
SECOND = 1.0  # what may be lost with the page cache
CONNECTOR = ("npu_kvconnector.connector", "npu_kvconnector.spec", "npu_kvconnector.tiers.durable.manager")
IMPORTED = (*IMPORTS, "vllm.model_executor.models.llama", "compressed_tensors", *CONNECTOR)


@dataclasses.dataclass
class Outcome:
    """What was found, summed over kills."""

    kills: int = 0
    caches_lost: int = 0
    """Kills that took the page cache too."""
    answers: int = 0
    wrong_answers: int = 0
    asked_again: int = 0
    """Prompts whose blocks an engine before had stored, at the first time that an engine was asked for them,"""
    loaded: int = 0
    """and those of them for which it had blocks."""
    checked: int = 0
    """Blocks that were read and compared."""
    wrong: int = 0
    """Blocks that are not what is computed."""
    missing: int = 0
    """Blocks that had to be there and are not: of a killed engine all that were stored, else those of before it."""
    damaged: int = 0
    """Blocks that the index names and that are not whole."""
    lost: int = 0
    """Blocks that went with the page cache."""
    late: int = 0
    """Of these, those that had been stored more than a second before."""
    oldest: float = 0.0
    """Seconds that a lost block had been there, at most."""
    adopted: int = 0
    """Blocks found behind the index."""
    rebuilt: int = 0
    """Kills after which the index had to be made again."""

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        return not (self.wrong_answers or self.wrong or self.missing or self.damaged or self.late)

    def add(self, other: Outcome) -> None:
        """Add what another lane has found."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, theirs) if field.name == "oldest" else mine + theirs)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What is computed: the tokens of each prompt, the names of its blocks, and the digest of each block."""

    tokens: list[list[int]]
    names: list[list[bytes]]
    digests: dict[bytes, bytes]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a fresh reader finds in a store: by name, when a block was stored."""

    stored_at: dict[bytes, float]
    wrong: int
    damaged: int
    adopted: int
    was_rebuilt: bool


def kill_engines(
    folder: Path, *, kills: int, seed: int, lost: int, lanes: int = 1, seconds: float = float("inf")
) -> Outcome:
    """Kill so many engines, or as many as there is time for; every ``lost``-th takes the page cache too (0: none).

    Raises:
        RuntimeError: an engine ended by itself.
    """
    until = time.monotonic() + seconds
    folder.mkdir(parents=True)
    try:
        model = models.tiny_llama(folder / "model", num_hidden_layers=2)
        prompts = models.prompt_token_ids([LENGTH] * PROMPTS, seed=8)
        shim = build_shim(folder)
        places = {1000 * seed + number: folder / f"lane-{number}" for number in range(lanes)}
        each = [Lane(place, shim, model, prompts, seed=number) for number, place in places.items()]
        truth = each[0].compute()
        shares = [kills // lanes + (number < kills % lanes) for number in range(lanes)]
        whole = Outcome()
        with ThreadPoolExecutor(lanes) as pool:
            running = [
                pool.submit(lane.run, truth, share, lost, until) for lane, share in zip(each, shares, strict=True)
            ]
            for lane in running:
                whole.add(lane.result())
        return whole
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Lane:
    """A store, and the process whose forks are the engines on it, its calls written down."""

    def __init__(self, place: Path, shim: Path, model: Path, prompts: list[list[int]], *, seed: int) -> None:
        """Begin to import what engines need."""
        self.place, self.root, self.journal = place, place / "root", place / "journal"
        self.model, self.prompts, self.seed = model, prompts, seed
        self.store = self.root / "store"
        self.root.mkdir(parents=True)
        watched = {"LD_PRELOAD": str(shim), "CRASH_ROOT": str(self.root), "CRASH_JOURNAL": str(self.journal)}
        device = {
            "NPU_SIMULATOR_MEMORY": "1GiB",
            "NPU_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_BATCH_INVARIANT": "1",
        }
        self.environ = os.environ | PASSIVE | {"OMP_NUM_THREADS": "1"} | device | watched
        self.server = ForkServer(*IMPORTED, environ=self.environ)

    def compute(self) -> Truth:
        """Ask for each prompt alone, without a connector, then with one that has nothing but stores."""
        tokens = []
        for quota in (0, LARGE):
            engine = self.start(quota, seed=None)
            if engine.wait(600):
                self.complain(engine)
            tokens.append([one["tokens"][0] for one in self.answers()])
        if tokens[0] != tokens[1]:
            msg = "an engine that only stores has other tokens than one without a connector"
            raise RuntimeError(msg)
        store = DurableStore(self.store, quota=LARGE, block_bytes=2**20)
        entries = sorted(store.index.entries(), key=lambda each: each[1].place)
        digests = {}
        for name, _ in entries:
            read = store.read(name)
            assert read is not None
            digests[name] = xxhash.xxh3_128_digest(read.payload)
        store.close()
        shutil.rmtree(self.store)
        share = (LENGTH + NEW - 1) // BLOCK
        assert len(entries) == PROMPTS * share, len(entries)
        names = [[name for name, _ in entries[at : at + share]] for at in range(0, len(entries), share)]
        return Truth(tokens[0], names, digests)

    def run(self, truth: Truth, kills: int, lost: int, until: float) -> Outcome:
        """Kill engines one after the other, as many as there is time for."""
        chance, outcome, held, of_store, stores = random.Random(self.seed), Outcome(), set[bytes](), 0, 0
        for number in range(kills):
            if time.monotonic() > until:
                break
            quota = SMALL if stores % 3 == 2 else LARGE
            takes_cache = lost > 0 and number % lost == lost - 1
            held = self.kill_one(truth, outcome, held, quota, chance, takes_cache=takes_cache)
            of_store += 1
            if len(held) > FULL * len(truth.digests) or of_store == KILLS_OF_A_STORE:
                shutil.rmtree(self.store)
                held, of_store, stores = set(), 0, stores + 1
        return outcome

    def kill_one(
        self, truth: Truth, outcome: Outcome, held: set[bytes], quota: int, chance: random.Random, *, takes_cache: bool
    ) -> set[bytes]:
        """Start an engine, kill it, and look at what it has answered and left; return the blocks that are there."""
        base = self.place / "before"
        if takes_cache:
            shutil.copytree(self.root, base)
        engine = self.start(quota, seed=chance.randrange(2**32))
        self.wait_for_stores(engine)
        time.sleep(chance.uniform(0.0, LONGEST))
        engine.kill()
        killed_at = time.time()
        if engine.wait(60) != -signal.SIGKILL:
            self.complain(engine)
        expected = held | self.check_answers(truth, held, outcome)
        found = self.look(truth, quota)
        if takes_cache:
            expected = held
            whole = found
            shutil.rmtree(self.root)
            records = read_journal(self.journal, self.root)
            play(records, len(records), self.root, chance, before=base)
            shutil.rmtree(base)
            found = self.look(truth, quota)
            gone = [at for name, at in whole.stored_at.items() if name not in found.stored_at]
            outcome.caches_lost += 1
            outcome.lost += len(gone)
            if quota == LARGE:
                outcome.late += sum(killed_at - at > SECOND for at in gone)
                outcome.oldest = max([outcome.oldest, *(killed_at - at for at in gone)])
        outcome.kills += 1
        outcome.checked += len(found.stored_at)
        outcome.wrong += found.wrong
        outcome.damaged += found.damaged
        outcome.missing += len(expected - found.stored_at.keys()) if quota == LARGE else 0
        outcome.adopted += found.adopted
        outcome.rebuilt += found.was_rebuilt
        return set(found.stored_at)

    def start(self, quota: int, seed: int | None) -> Fork:
        """Start an engine with a tier of that quota, or without a connector where it is 0."""
        tier = {"type": "durable", "path": str(self.store), "bytes": quota}
        options = {"cpu_bytes_to_use": "8MiB", "offload_prompt_only": False, "secondary_tiers": [tier]}
        transfer = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
        engine = {
            "model": str(self.model),
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 40,
            "enforce_eager": True,
            **({"kv_transfer_config": transfer} if quota else {}),
        }
        scenario = {"engine": engine, "prompts": self.prompts, "max_tokens": NEW, "seed": seed}
        (self.place / "scenario.json").write_text(json.dumps(scenario))
        for name in ("answers", "journal"):
            (self.place / name).write_bytes(b"")
        arguments = ("tests.support.killed_engine", str(self.place / "scenario.json"), str(self.place / "answers"))
        with (self.place / "output").open("wb") as output:
            return self.server.start(
                AS_MODULE, *arguments, environ=self.environ, stdout=output, stderr=output, new_session=True
            )

    def wait_for_stores(self, engine: Fork) -> None:
        """Wait until an engine has begun to store: a writer begins a segment of its own."""
        before, until = self.segments(), time.monotonic() + 120
        while self.segments() <= before:
            time.sleep(0.002)
            if engine.poll() is not None or time.monotonic() > until:
                self.complain(engine)

    def segments(self) -> set[str]:
        """Return the files of blocks."""
        return {path.name for path in self.store.glob("segments/*.seg")}

    def complain(self, engine: Fork) -> None:
        """Raise, with what the engine has said."""
        msg = f"an engine ended with {engine.poll()} or did not store: {(self.place / 'output').read_text()[-4000:]}"
        raise RuntimeError(msg)

    def answers(self) -> list[dict[str, Any]]:
        """Return the batches that an engine has answered; a line that is cut short does not count."""
        return [json.loads(line) for line in (self.place / "answers").read_text().split("\n")[:-1]]

    def check_answers(self, truth: Truth, held: set[bytes], outcome: Outcome) -> set[bytes]:
        """Compare the tokens of all answers; return the blocks that were stored before the kill."""
        stored, waiting, known = set[bytes](), set[bytes](), set[int]()
        for batch in self.answers():
            for number, tokens, cached in zip(batch["numbers"], batch["tokens"], batch["cached"], strict=True):
                outcome.answers += 1
                outcome.wrong_answers += tokens != truth.tokens[number]
                if number not in known and held.issuperset(truth.names[number]):
                    outcome.asked_again += 1
                    outcome.loaded += cached > 0
                known.add(number)
                waiting.update(truth.names[number])
            if batch["is_stored"]:
                stored |= waiting
                waiting = set()
        return stored

    def look(self, truth: Truth, quota: int) -> Found:
        """Open a copy of the store as a server does, and compare every block in it."""
        copy = self.place / "copy"
        shutil.copytree(self.store, copy)
        store = DurableStore(copy, quota=quota, block_bytes=2**15, commit_seconds=0)
        stored_at, wrong, damaged = {}, 0, 0
        for name, entry in list(store.index.entries()):
            read = store.read(name)
            if read is None:
                damaged += 1
                continue
            stored_at[name] = entry.stored_at
            wrong += truth.digests.get(name) != xxhash.xxh3_128_digest(read.payload)
        adopted, was_rebuilt = store.recovered.adopted, store.recovered.was_rebuilt
        store.close()
        shutil.rmtree(copy)
        return Found(stored_at, wrong, damaged, adopted, was_rebuilt)


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="tests.support.engine_kills", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lost", type=int, default=5, help="every so many kills take the page cache too (0: none)")
    parser.add_argument("--lanes", type=int, default=2, help="stores beside each other")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after so many")
    options = vars(parser.parse_args(arguments))
    outcome = kill_engines(options.pop("folder"), **options)
    print(json.dumps(dataclasses.asdict(outcome)))
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
