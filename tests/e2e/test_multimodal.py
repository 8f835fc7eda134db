"""Models that see or hear say on npu what they say in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

from tests.support import multimodal
from tests.support.engine_run import run_engine

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 12
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 27, "skip_tokenizer_init": False}


def test_images_in_prompts(tmp_path: Path) -> None:
    folder = multimodal.tiny_llava(tmp_path / "model")
    prompts = [[1, multimodal.IMAGE_TOKEN, 20, 30], [1, 7, multimodal.IMAGE_TOKEN, 20, 30, 40], [1, 20, 30]]
    images = [0, 2, None]
    outputs = run(tmp_path, folder, prompts, seen=images, max_model_len=256)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    processor = transformers.AutoProcessor.from_pretrained(folder).image_processor
    for ids, seed, output in zip(prompts, images, outputs, strict=True):
        place = ids.index(multimodal.IMAGE_TOKEN) if seed is not None else 0
        tokens = (
            ids if seed is None else ids[:place] + [multimodal.IMAGE_TOKEN] * multimodal.IMAGE_TOKENS + ids[place + 1 :]
        )
        pixels = None if seed is None else processor(multimodal.image(seed), return_tensors="pt").pixel_values
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens + output[:-1]]), pixel_values=pixels).logits[0]
        assert logits[len(tokens) - 1 :].argmax(-1).tolist() == output


def test_recordings_in_a_mixed_batch(tmp_path: Path) -> None:
    folder = multimodal.tiny_whisper(tmp_path / "model")
    prompts = [[257, 258], [257, 258, 259], [257, 258, 259, 264], [257]]
    outputs = run(tmp_path, folder, prompts, heard=[0, 1, 2, 3], max_model_len=64, max_num_batched_tokens=1600)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)

    def said(ids: list[int], output: list[int], seed: int) -> list[int]:
        sound = multimodal.recording(seed)
        heard = extractor(sound, sampling_rate=multimodal.SAMPLING_RATE, return_tensors="pt").input_features
        with torch.inference_mode():
            logits = model(input_features=heard, decoder_input_ids=torch.tensor([ids + output[:-1]])).logits[0]
        return logits[len(ids) - 1 :].argmax(-1).tolist()

    for seed, (ids, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert said(ids, output, seed) == output
    assert said(prompts[0], outputs[0], 3) != outputs[0]  # who hears something else says something else


def run(folder: Path, model: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Return what the engine says greedily."""
    kinds = {kind: options.pop(kind) for kind in ("seen", "heard") if kind in options}
    one = {"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": STEPS}, **kinds}
    done = run_engine(folder, model, [one], **SETTINGS | options)
    assert done.platform == "npu"
    assert done.graphs_captured
    return done.tokens(0)
