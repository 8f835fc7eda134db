"""Parts of the remote tier by themselves: packs, their index, codecs, hedged reads."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_kvconnector.errors import IntegrityError, OptionError
from npu_kvconnector.tiers.remote.codec import decode, open_codec
from npu_kvconnector.tiers.remote.hedging import Hedge
from npu_kvconnector.tiers.remote.pack import MOST_RECORDS, TABLE_BYTES, Place, join, read_table
from npu_kvconnector.tiers.remote.pack_index import PackIndex
from npu_kvconnector.tiers.remote.store import Record

RECORDS = [Record(bytes([number]) * 32, b"header", b"payload" * number) for number in range(5)]


def test_a_pack_s_table_names_its_records() -> None:
    content, places = join(RECORDS)
    assert read_table(content[:TABLE_BYTES], len(content)) == places
    for record, place in zip(RECORDS, places, strict=True):
        assert place.name == record.name
        assert content[place.offset : place.offset + place.length] == record.header + bytes(record.payload)


def test_the_longest_table_is_read_at_once() -> None:
    content, places = join([Record(number.to_bytes(32, "big"), b"", b"x") for number in range(MOST_RECORDS)])
    assert read_table(content[:TABLE_BYTES], len(content)) == places


@given(at=st.integers(0, 270), change=st.integers(1, 255))
def test_a_damaged_table_is_no_table(at: int, change: int) -> None:
    content = bytearray(join(RECORDS)[0])
    content[at] ^= change
    with pytest.raises(IntegrityError):
        read_table(bytes(content[:TABLE_BYTES]), len(content))


@given(st.binary(max_size=300))
def test_other_bytes_are_no_table(content: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_table(content, len(content))


def test_a_table_names_no_bytes_beyond_its_object() -> None:
    content, _ = join(RECORDS)
    with pytest.raises(IntegrityError, match="beyond"):
        read_table(content[:-1], len(content) - 1)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["add", "drop", "forget"])), max_size=60))
def test_the_index_names_packs_that_it_knows(steps: list[tuple[int, str]]) -> None:
    index, added, newest = PackIndex(most_blocks=12), {}, {}
    for number, (value, kind) in enumerate(steps):
        name = bytes([value % 7])
        if kind == "add":
            places = [Place(bytes([(value + i) % 7]), i, 1) for i in range(3)]
            added[f"{number:03}"] = places
            newest |= {place.name: f"{number:03}" for place in places}
            index.add(f"{number:03}", places)
        elif kind == "drop" and added:
            index.drop(sorted(added)[value % len(added)])
        else:
            index.forget(name)
        found = index.find(name)
        if found is not None:
            assert found[1] in added[found[0]]
            assert found[0] <= newest[name]
        assert (name in index) == (found is not None)
        assert len(index) <= 12


def test_a_full_index_leaves_out_the_oldest_pack() -> None:
    index = PackIndex(most_blocks=2)
    for number in range(3):
        index.add(f"pack-{number}", [Place(bytes([number]), 0, 1)])
    assert [bytes([number]) in index for number in range(3)] == [False, True, True]
    assert index.knows("pack-0")  # so that a listing does not bring it back


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_zstd_is_exact(dtype: str) -> None:
    block = numbers(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    codec = open_codec("zstd", dtype)
    assert codec is not None
    payload = codec.encode(block)
    assert payload is not None
    assert len(payload) < 0.95 * len(block)
    assert bytes(decode(codec, codec.number, payload, len(block))) == block


def test_zstd_leaves_noise_as_it_is() -> None:
    codec = open_codec("zstd", "bfloat16")
    assert codec is not None
    assert codec.encode(np.random.default_rng(0).bytes(4096)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fp8_rounds_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    values = numbers(dtype)
    codec = open_codec("fp8", str(dtype))
    assert codec is not None
    payload = codec.encode(values.view(torch.uint8).numpy())
    assert payload is not None
    assert len(payload) == values.numel() * (1 + 4 / 64)
    back = torch.frombuffer(bytearray(decode(codec, codec.number, payload, values.nbytes)), dtype=dtype).float()
    exact = values.float()
    largest = exact.view(-1, 64).abs().amax(1, keepdim=True).expand(-1, 64).reshape(-1)
    allowed = torch.maximum(exact.abs() / 16, largest / 448 * 2**-9) * 1.01  # and the rounding to dtype
    assert ((back - exact).abs() <= allowed).all()
    assert float((back - exact).norm() / exact.norm()) < 0.03


def test_fp8_of_zeros_and_of_what_has_no_scale() -> None:
    codec = open_codec("fp8", "bfloat16")
    assert codec is not None
    zeros = bytearray(256)
    assert bytes(decode(codec, codec.number, codec.encode(zeros) or b"", 256)) == zeros
    assert codec.encode(torch.full((128,), float("inf"), dtype=torch.bfloat16).view(torch.uint8).numpy()) is None


def test_fp8_is_refused_for_other_caches() -> None:
    with pytest.raises(OptionError, match="zstd"):
        open_codec("fp8", "fp8_e4m3")


@given(st.binary(max_size=300), st.sampled_from(["zstd", "fp8"]))
def test_no_payload_breaks_a_codec(payload: bytes, name: str) -> None:
    codec = open_codec(name, "bfloat16")
    assert codec is not None
    try:
        block = decode(codec, codec.number, payload, 4096)
    except IntegrityError:
        return
    assert memoryview(block).nbytes == 4096


class Store:
    """Answers after the seconds that it is told, with the number of the call."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.calls, self.ended = list(seconds), 0, 0

    async def read(self) -> int:
        number, self.calls = self.calls, self.calls + 1
        try:
            wait = self.seconds[number] if number < len(self.seconds) else 0.0
            if wait < 0:
                raise OSError
            await asyncio.sleep(wait)
        finally:
            self.ended += 1
        return number


def test_a_slow_read_is_sent_again_and_the_first_answer_counts() -> None:
    async def scenario() -> None:
        hedge, store = Hedge(), Store(*[0.001] * 40, 30.0)
        for _ in range(40):
            await hedge.read(store.read)
        began = time.monotonic()
        assert await hedge.read(store.read) == 41
        assert time.monotonic() - began < 10
        assert (hedge.sent, store.ended) == (1, 42)  # the slow one was cancelled

    asyncio.run(scenario())


def test_a_store_that_is_slow_throughout_is_not_asked_twice_as_often() -> None:
    async def scenario() -> None:
        hedge, store = Hedge(), Store(*[0.0] * 20, *[0.02] * 200)
        for _ in range(120):
            await hedge.read(store.read)
        assert hedge.sent <= 7

    asyncio.run(scenario())


def test_an_error_is_raised_once_no_answer_is_left() -> None:
    async def scenario() -> None:
        with pytest.raises(OSError):
            await Hedge().read(Store(-1).read)
        hedge, store = Hedge(enabled=False), Store(*[0.0] * 30, 0.05)
        for _ in range(31):
            await hedge.read(store.read)
        assert hedge.sent == 0

    asyncio.run(scenario())
