"""Recordings that clients send to the server are heard as transformers hears them."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
import torch
import transformers

from tests.support import multimodal
from tests.support.server import serve

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

SMALL = ("--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20))
NEW = 8


def test_recordings(tmp_path: Path) -> None:
    pytest.importorskip("soundfile", reason="vLLM decodes recordings with it")
    folder = multimodal.tiny_whisper(tmp_path / "model")
    with serve(folder, tmp_path, *SMALL, "--max-model-len", "64", "--max-num-batched-tokens", "1600") as server:
        texts = []
        for seed in (0, 1):
            answer = httpx.post(
                f"{server.url}/v1/audio/transcriptions",
                files={"file": ("sound.wav", as_wave(multimodal.recording(seed)))},
                data={"model": "demo", "language": "en", "temperature": "0", "max_completion_tokens": str(NEW)},
                timeout=120,
                trust_env=False,
            )
            assert answer.status_code == httpx.codes.OK, answer.text
            texts.append(answer.json()["text"])
    assert texts == [heard(folder, seed) for seed in (0, 1)]
    assert texts[0] != texts[1]


def as_wave(sound: np.ndarray) -> bytes:
    """Return the file that holds a recording in 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(multimodal.SAMPLING_RATE)
        writer.writeframes(whole_numbers(sound).tobytes())
    return file.getvalue()


def whole_numbers(sound: np.ndarray) -> np.ndarray:
    """Return a recording as int16, for a fourth of the range is one standard deviation."""
    return (sound * 8192).clip(-32768, 32767).astype(np.int16)


@torch.inference_mode()
def heard(folder: Path, seed: int) -> str:
    """Return what transformers writes about a recording."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    processor = transformers.WhisperProcessor.from_pretrained(folder)
    sound = whole_numbers(multimodal.recording(seed)).astype(np.float32) / 32768
    features = processor.feature_extractor(sound, sampling_rate=multimodal.SAMPLING_RATE, return_tensors="pt")
    begin = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    ids = processor.tokenizer(begin, add_special_tokens=False, return_tensors="pt").input_ids
    for _ in range(NEW):
        logits = model(input_features=features.input_features, decoder_input_ids=ids).logits[0, -1]
        if logits.argmax().item() == model.config.eos_token_id:
            break
        ids = torch.cat((ids, logits.argmax().view(1, 1)), dim=1)
    return str(processor.tokenizer.decode(ids[0, 4:], skip_special_tokens=True))
