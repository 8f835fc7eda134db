"""The envelope of a block on disk: what was packed is read back, and nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_kvconnector.errors import IntegrityError
from npu_kvconnector.tiers.durable import envelope
from npu_kvconnector.tiers.durable.envelope import Header, pack, record_bytes, unpack, verify
from npu_kvconnector.tiers.durable.files import PAGE, page_buffer

NUMBERS = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    segment=NUMBERS,
    offset=NUMBERS,
    realm=st.binary(min_size=16, max_size=16),
    name=st.binary(min_size=32, max_size=32),
    size=st.just(0),
    block_bytes=NUMBERS,
    codec=st.integers(0, 2**16 - 1),
    stored_at=st.floats(0, 2**40),
    digest=st.just(b""),
)


@given(HEADERS, st.binary(max_size=300))
def test_what_was_packed_is_read_back(header: Header, payload: bytes) -> None:
    header = header._replace(size=len(payload))
    page = page_buffer(PAGE)
    pack(header, payload, page)
    found = verify(page, payload)
    assert found._replace(digest=b"") == header
    assert unpack(page) == found


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_is_noticed(payload: bytes, data: st.DataObject) -> None:
    page = page_buffer(PAGE)
    pack(Header(1, PAGE, bytes(16), bytes(32), len(payload), len(payload), 0, 0.0), payload, page)
    record = bytearray(bytes(page[: envelope._END]) + payload)
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError):
        verify(memoryview(record)[: envelope._END], memoryview(record)[envelope._END :])


@given(st.binary(max_size=4 * PAGE))
def test_noise_is_no_envelope(noise: bytes) -> None:
    with pytest.raises(IntegrityError):
        unpack(memoryview(noise))


def test_a_payload_of_another_length_is_refused() -> None:
    page = page_buffer(PAGE)
    pack(Header(1, PAGE, bytes(16), bytes(32), 3, 3, 0, 0.0), b"abc", page)
    with pytest.raises(IntegrityError, match="2 bytes, not 3"):
        verify(page, b"ab")


@pytest.mark.parametrize(("size", "pages"), [(0, 1), (1, 2), (PAGE, 2), (PAGE + 1, 3)])
def test_records_take_whole_pages(size: int, pages: int) -> None:
    assert record_bytes(size) == pages * PAGE
