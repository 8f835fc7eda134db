"""The outbox: bounded, by transfer, and patient with what still comes."""

from __future__ import annotations

import asyncio

from npu_kvconnector.tiers.tcp.outbox import Outbox

A, B = b"a" * 32, b"b" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def put(box: Outbox, transfer: str, name: bytes, size: int = 10) -> bool:
    box.begin(transfer)
    is_there = box.reserve(size)
    if is_there:
        box.put(transfer, name, bytes(size))
    box.end(transfer)
    return is_there


def find(box: Outbox, transfer: str, *names: bytes, seconds: float = 0.0) -> list[bool]:
    return asyncio.run(box.find(transfer, names, seconds))


def test_blocks_are_those_of_their_transfer() -> None:
    box = Outbox(100, 1)
    assert put(box, "one", A)
    assert find(box, "one", A, B) == [True, False]
    assert find(box, "two", A) == [False]
    assert box.get("two", [A]) == [None]
    assert box.get("one", [A, B]) == [bytes(10), None]


def test_no_more_bytes_than_there_is_room_for() -> None:
    box = Outbox(25, 1)
    assert put(box, "one", A)
    assert put(box, "one", B)
    assert not put(box, "one", b"c" * 32)
    assert box.used_bytes == 20
    assert box.drop(["one", "none"]) == 2
    assert box.used_bytes == 0


def test_a_block_that_comes_twice_or_too_late_takes_no_room() -> None:
    box = Outbox(100, 1)
    put(box, "one", A)
    put(box, "one", A)
    assert box.used_bytes == 10
    box.begin("two")
    assert box.reserve(10)
    box.drop(["two"])
    box.put("two", A, bytes(10))
    box.end("two")
    assert box.used_bytes == 10


def test_who_asks_waits_for_what_is_still_computed() -> None:
    box = Outbox(100, 1)

    async def scenario() -> list[bool]:
        box.open("one")
        asked = asyncio.create_task(box.find("one", [A, B], 30))
        await asyncio.sleep(0)
        put(box, "one", A)
        await asyncio.sleep(0)
        assert not asked.done()
        box.begin("one")
        box.close("one")  # the request has ended, and its last block is on its way
        await asyncio.sleep(0)
        assert not asked.done()
        assert box.reserve(10)
        box.put("one", B, bytes(10))
        box.end("one")
        return await asked

    assert asyncio.run(scenario()) == [True, True]


def test_who_asks_for_what_does_not_come_hears_so_when_the_request_ends_or_time_is_up() -> None:
    box = Outbox(100, 1)

    async def scenario() -> tuple[list[bool], list[bool]]:
        box.open("one")
        late = await box.find("one", [A], 0.01)
        asked = asyncio.create_task(box.find("one", [A], 30))
        await asyncio.sleep(0)
        box.close("one")
        return late, await asked

    assert asyncio.run(scenario()) == ([False], [False])


def test_what_nobody_asks_for_expires_and_what_is_wanted_does_not() -> None:
    clock = Clock()
    box = Outbox(100, 10, clock)
    box.open("running")
    for transfer in ("asked", "kept", "left"):
        put(box, transfer, A)
    clock.now = 8
    box.get("asked", [A])
    box.keep(["kept", "unknown"])
    clock.now = 11
    assert box.expire() == 1
    assert find(box, "left", A) == [False]
    assert find(box, "asked", A) == find(box, "kept", A) == [True]
    clock.now = 50
    assert box.expire() == 2
    box.close("running")
    assert box.expire() == 0
    clock.now = 70
    assert box.used_bytes == 0
