"""The handshake: what vLLM's client asks is answered, and nothing else, whatever its bytes."""

from __future__ import annotations

import os
import random

# vLLM infers a device as soon as it is imported; these tests run in an environment without a platform plugin.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import msgspec
import pytest

pytest.importorskip("vllm")

from npu_kvconnector.p2p.scheduler import answer_handshake

DATA = {(0, 0): b"first worker", (0, 1): b"second worker"}


def question(*parts: object) -> bytes:
    return msgspec.msgpack.encode(parts)


def test_workers_are_told_apart() -> None:
    for ranks, data in DATA.items():
        answer = answer_handshake(DATA, question(b"get_meta_msg", *ranks))
        assert answer is not None
        assert answer[0] == data
        assert msgspec.msgpack.decode(answer[1], type=float) > 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        question(b"get_meta_msg", 0),
        question(b"get_meta_msg", 0, 2),
        question(b"get_meta_msg", 0, "0"),
        question(b"get_meta_msg", 0, 0, 0),
        question(b"another", 0, 0),
        question(b"get_meta_msg", 0, 2**64 - 1),
        msgspec.msgpack.encode({"get_meta_msg": 0}),
    ],
)
def test_other_questions_are_dropped(request_bytes: bytes) -> None:
    assert answer_handshake(DATA, request_bytes) is None


def test_100_000_frames_of_noise_are_dropped() -> None:
    chance, good = random.Random(0), question(b"get_meta_msg", 0, 0)
    for _ in range(100_000):
        frame = bytearray(good if chance.random() < 0.5 else chance.randbytes(chance.randint(0, 64)))
        for _ in range(chance.randint(1, 3)):
            at = chance.randint(0, len(frame))
            frame[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        answer = answer_handshake(DATA, bytes(frame))
        assert answer is None or answer[0] in DATA.values()
