"""The crash oracle: SIGKILLs, power cuts and failing calls. Never a wrong byte, nothing acknowledged lost."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from npu_kvconnector.commands.stress import Outcome, acknowledged, check
from npu_kvconnector.errors import IntegrityError
from npu_kvconnector.tiers.durable import envelope
from npu_kvconnector.tiers.durable.envelope import Header
from npu_kvconnector.tiers.durable.files import PAGE, page_buffer
from npu_kvconnector.tiers.durable.index import Entry, decode_entry, encode_entry
from npu_kvconnector.tiers.durable.segments import Place, SegmentReader
from npu_kvconnector.tiers.durable.store import DurableStore
from tests.support.crash import build_shim, lose_page, moments, play, play_whole, read_journal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.crash import Record

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the journal of calls is made by a C library")

LARGE, SMALL = 2**30, 8 * 2**20
"""Quotas: for all blocks, and one by which blocks go all the time."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


def run_writer(shim: Path, root: Path, *, quota: int, seed: int, blocks: int, **environment: str) -> None:
    command = [sys.executable, "-m", "npu_kvconnector.commands.stress"]
    command += [str(root / "store"), str(root / "ack"), str(quota), str(seed), str(blocks)]
    env = os.environ | {"LD_PRELOAD": str(shim), "CRASH_ROOT": str(root)} | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 3, "the writer read a wrong byte"
    assert done.returncode == 0 or "CRASH_STORM" in environment, done.stderr


@pytest.fixture(scope="module")
def journal(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], list[Record]]:
    """Returns what a writer of 300 blocks did to its files; of a quota and a seed."""

    @functools.cache
    def journal_of(quota: int, seed: int) -> list[Record]:
        folder = tmp_path_factory.mktemp("journal")
        root, path = folder / "root", folder / "journal"
        root.mkdir()
        run_writer(shim, root, quota=quota, seed=seed, blocks=300, CRASH_JOURNAL=str(path))
        return read_journal(path, root)

    return journal_of


@pytest.mark.parametrize("quota", [LARGE, SMALL])
def test_the_journal_lacks_no_call(quota: int, shim: Path, tmp_path: Path) -> None:
    """Two writers, one after the other, so that an index is moved and removed as well."""
    root = tmp_path / "root"
    root.mkdir()
    for seed in (1, 2):
        run_writer(shim, root, quota=quota, seed=seed, blocks=60, CRASH_JOURNAL=str(tmp_path / "journal"))
    play_whole(read_journal(tmp_path / "journal", root), tmp_path / "again")

    def files_of(folder: Path) -> dict[str, bytes]:
        paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock.mdb"]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    there, again = files_of(root), files_of(tmp_path / "again")
    assert sorted(there) == sorted(again)
    assert [name for name, data in there.items() if again[name] != data] == []
    assert {"data.mdb", "store.json"} < {name.rpartition("/")[2] for name in there}


@pytest.mark.parametrize(("seed", "cuts"), [(1, 6), pytest.param(2, 300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("quota", [LARGE, SMALL])
def test_a_power_cut_takes_no_more_than_what_was_not_acknowledged(
    quota: int, seed: int, cuts: int, journal: Callable[[int, int], list[Record]], tmp_path: Path
) -> None:
    records = journal(quota, seed)
    assert sum(record.op == "f" for record in records) > 20
    assert any(record.op == "W" for record in records)  # LMDB's pages of its state are seen too
    chance, outcome = random.Random(seed), Outcome()
    for number, end in enumerate(moments(records, chance, cuts)):
        place = tmp_path / f"cut-{number}"
        acks = play(records, end, place, chance).split(b"\n")[:-1]
        done = int(acks[-1]) if acks else 0
        check(place / "store", done, quota=quota, outcome=outcome, numbers=300, evicts=quota == SMALL)
        shutil.rmtree(place)
    assert outcome.is_good, outcome
    assert outcome.rounds == cuts
    assert outcome.checked > 10 * cuts
    assert outcome.rebuilt == 0  # at each moment the index is what one of its transactions left


@pytest.mark.parametrize(("losses", "rebuilt"), [(6, 0), pytest.param(200, 80, marks=pytest.mark.nightly)])
def test_a_page_of_the_index_that_the_disk_lost_costs_no_block(
    losses: int, rebuilt: int, journal: Callable[[int, int], list[Record]], tmp_path: Path
) -> None:
    """What the disk gives back there may be an older page, which is whole."""
    records, chance, outcome = journal(LARGE, 1), random.Random(losses), Outcome()
    commits = [number for number, record in enumerate(records) if record.op == "W" and "/index-" in record.path]
    for number in range(losses):
        last = chance.randrange(1, len(commits))
        pages = [
            each
            for each in range(commits[last - 1], commits[last])
            if records[each].op == "w" and records[each].path == records[commits[last]].path
        ]
        left = lose_page(records[: commits[last] + 1], chance.choice(pages), chance)
        place = tmp_path / f"loss-{number}"
        acks = play(left, len(left), place, chance).split(b"\n")[:-1]
        check(place / "store", int(acks[-1]) if acks else 0, quota=LARGE, outcome=outcome, numbers=300)
        shutil.rmtree(place)
    assert outcome.is_good, outcome
    assert outcome.rounds == losses
    assert outcome.rebuilt >= rebuilt  # about two thirds; other pages hold what is made anew in any case


@pytest.mark.parametrize(
    ("lanes", "rounds"),
    [(1, 13), pytest.param(4, 250, id="1000", marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])],
)
def test_a_killed_writer_loses_nothing_that_was_acknowledged(lanes: int, rounds: int, tmp_path: Path) -> None:
    """In stores beside each other, since a round is mostly waiting."""
    command = [sys.executable, "-m", "npu_kvconnector.cli", "stress", "--json", "--rounds", str(rounds)]
    places = {lane: tmp_path / f"stress-{lane}" for lane in range(lanes)}
    running = [
        subprocess.Popen([*command, "--seed", str(lane), str(place)], stdout=subprocess.PIPE, text=True)
        for lane, place in places.items()
    ]
    found = [json.loads(process.communicate()[0]) for process in running]
    print(found)  # the counts of the night
    for outcome in found:
        assert outcome["wrong"] == outcome["missing"] == 0
        assert outcome["rounds"] == rounds
        assert outcome["checked"] > 10 * rounds
    assert not any(place.exists() for place in places.values())


@pytest.mark.parametrize("quota", [LARGE, SMALL])
@pytest.mark.parametrize(
    ("rounds", "per_mille"),
    [(1, 30), pytest.param(200, 100, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])],
)
def test_failing_calls_cost_blocks_and_nothing_else(
    rounds: int, per_mille: int, quota: int, shim: Path, tmp_path: Path
) -> None:
    outcome = Outcome()
    for seed in range(1, rounds + 1):
        root = tmp_path / f"root-{seed}"
        root.mkdir()
        run_writer(shim, root, quota=quota, seed=seed, blocks=200, CRASH_STORM=f"{seed}:{per_mille}:{20 * seed}")
        if (root / "store" / "store.json").exists():
            done = acknowledged(root / "ack")
            # A store that fails is dropped, and the number goes on: what is missing was never acknowledged as stored.
            check(root / "store", done, quota=quota, outcome=outcome, numbers=200, evicts=True)
        shutil.rmtree(root)
    assert outcome.wrong == 0
    assert outcome.checked > 0


@pytest.mark.parametrize(
    ("numbers", "every"),
    [
        ((6, 200, 47), 41),  # both even ones, whose stores hold all blocks, and odd ones
        *(
            pytest.param((1, 240, 1), every, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])
            for every in (41, 43, 47, 53, 67)  # more than an opening calls, so that a store opens again
        ),
    ],
)
def test_each_call_may_fail(numbers: tuple[int, int, int], every: int, shim: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.call_faults", str(tmp_path), *map(str, numbers), str(every)]
    env = os.environ | {"LD_PRELOAD": str(shim), "CRASH_ROOT": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=7000)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)  # the counts of the night
    assert found["ended"] == [], done.stderr
    assert found["wrong"] == found["missing"] == 0
    assert found["faults"] > 2 * len(range(*numbers))
    assert found["checked"] > 5 * found["runs"]


def test_a_clock_that_jumps_costs_nothing(shim: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    run_writer(shim, tmp_path / "root", quota=LARGE, seed=1, blocks=200, CRASH_CLOCK="7")
    store = DurableStore(tmp_path / "root" / "store", quota=LARGE, block_bytes=100_000)
    ages = [entry.stored_at for _, entry in store.index.entries()]
    assert max(ages) - min(ages) > 5 * 365 * 86_400  # it did jump
    store.close()
    outcome = Outcome()
    check(tmp_path / "root" / "store", 200, quota=LARGE, outcome=outcome, numbers=200)
    assert outcome.is_good
    assert outcome.checked == 200


@pytest.mark.parametrize("rounds", [1_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_fuzzed_records_are_refused_or_what_was_stored(rounds: int, tmp_path: Path) -> None:
    chance = random.Random(rounds)
    payload = chance.randbytes(3 * PAGE)
    path = tmp_path / f"{1:016x}.seg"
    page = page_buffer(PAGE)
    envelope.pack(Header(1, PAGE, bytes(16), bytes(32), len(payload), len(payload), 0, 0.0), payload, page)
    record = bytes(PAGE) + bytes(page) + payload
    buffer = page_buffer(8 * PAGE)
    passed = 0
    for _ in range(rounds):
        data = bytearray(record)
        kind = chance.randrange(4)
        if kind == 0:
            data[chance.randrange(PAGE, len(data))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            start = chance.randrange(PAGE, PAGE + 160)
            data[start : start + 8] = chance.randbytes(8)
        elif kind == 2:
            del data[chance.randrange(len(data)) :]
        else:
            start = chance.randrange(PAGE, len(data))
            data[start:] = chance.randbytes(len(data) - start)
        path.write_bytes(data)
        with SegmentReader(tmp_path, 1) as segment:
            size = chance.choice([len(payload), 0, PAGE])
            try:
                header, found = segment.read(Place(1, PAGE, size), buffer)
            except IntegrityError:
                pass
            else:
                passed += 1
                assert bytes(found) == payload
                assert header.name == bytes(32)
            for each in segment.scan(PAGE, len(data), payloads=True):
                assert each.size == len(payload)
    assert passed < rounds // 10  # padding that changed is no harm


@pytest.mark.parametrize("rounds", [2_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_fuzzed_entries_of_the_index_are_refused(rounds: int) -> None:
    chance = random.Random(rounds)
    name = chance.randbytes(32)
    good = encode_entry(name, Entry(Place(1, 2, 3), 4, 5, bytes(16), 6.0, 7, 8))
    for _ in range(rounds):
        data = bytearray(good)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        assert decode_entry(name, bytes(data)) is None
        assert decode_entry(name, chance.randbytes(chance.randrange(200))) is None
    assert decode_entry(chance.randbytes(32), good) is None
