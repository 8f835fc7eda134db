"""Recordings and videos that clients send to the server are heard and seen as transformers hears and sees them."""

from __future__ import annotations

import base64
import io
import wave
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.support import multimodal
from tests.support.server import serve

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

SMALL = ("--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20))
NEW = 8
FRAMES = 4
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


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


def test_videos(tmp_path: Path) -> None:
    folder = multimodal.tiny_qwen2_5_vl(tmp_path / "model")
    template = ("--chat-template", CHAT_TEMPLATE, "--chat-template-content-format", "openai")
    with serve(folder, tmp_path, *SMALL, *template, "--max-model-len", "512") as server:
        texts = []
        for seed in (0, 1):
            url = "data:video/jpeg;base64," + ",".join(base64.b64encode(one).decode() for one in frames(seed))
            content = [{"type": "text", "text": "t20 "}, {"type": "video_url", "video_url": {"url": url}}]
            messages = [{"role": "user", "content": content}]
            options = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
            answer = server.ask("/v1/chat/completions", messages=messages, **options)
            texts.append(answer["choices"][0]["message"]["content"].strip())
    assert texts == [seen(folder, seed) for seed in (0, 1)]
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


def frames(seed: int) -> list[bytes]:
    """Return the frames of a video, as JPEG."""
    files = [io.BytesIO() for _ in range(FRAMES)]
    for number, file in enumerate(files):
        pixels = np.random.default_rng([seed, number]).random((56, 56, 3))
        Image.fromarray((255 * pixels).astype(np.uint8)).save(file, "JPEG")
    return [file.getvalue() for file in files]


@torch.inference_mode()
def seen(folder: Path, seed: int) -> str:
    """Return what transformers says about a video of one frame a second, as vLLM takes frames for."""
    reference = transformers.Qwen2_5_VLForConditionalGeneration
    model = reference.from_pretrained(folder, attn_implementation="eager").eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    video = np.stack([np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in frames(seed)])
    text = "t20 <|vision_start|><|video_pad|><|vision_end|>"
    when = {"fps": 1.0, "total_num_frames": FRAMES, "frames_indices": list(range(FRAMES))}
    options: dict[str, Any] = {"video_metadata": [when], "do_sample_frames": False}
    inputs = processor(text=[text], videos=[video], return_tensors="pt", **options)
    ids = model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return str(processor.tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).strip())
