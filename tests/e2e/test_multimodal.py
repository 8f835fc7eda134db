"""Models that see or hear say on npu what they say in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from tests.support import multimodal
from tests.support.engine_run import EngineRun, run_engine, run_engines

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = {"temperature": 0.0, "max_tokens": 12}
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 27, "skip_tokenizer_init": False}


# image tokens amid those that Qwen's prompts put around them, and a prompt without an image
PROMPTS = [[1, 4, multimodal.IMAGE_TOKEN, 5, 20, 30], [1, 7, 4, multimodal.IMAGE_TOKEN, 5, 20, 30, 40], [1, 20, 30]]
IMAGES = [0, 2, None]
SEEING = {"llava": multimodal.tiny_llava, "qwen2.5": multimodal.tiny_qwen2_5_vl, "qwen3": multimodal.tiny_qwen3_vl}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, EngineRun]]:
    folder = tmp_path_factory.mktemp("seeing")
    made = {name: make(folder / name) for name, make in SEEING.items()}
    one = {"prompts": PROMPTS, "sampling": GREEDY, "seen": IMAGES}
    outcome = run_engines(folder, list(made.values()), [one], **SETTINGS | {"max_model_len": 256})
    return {name: (made[name], run) for name, run in zip(made, outcome, strict=True)}


@pytest.mark.parametrize("name", SEEING)
def test_images_in_prompts(name: str, seeing: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = seeing[name]
    check(run)
    reference = transformers.AutoModelForImageTextToText
    model = reference.from_pretrained(folder, attn_implementation="eager").eval()
    processor = transformers.AutoProcessor.from_pretrained(folder).image_processor
    for ids, seed, output in zip(PROMPTS, IMAGES, run.tokens(0), strict=True):
        tokens, seen = (ids, {}) if seed is None else with_image(ids, processor, seed)
        full = torch.tensor([tokens + output[:-1]])
        if "image_grid_thw" in seen:
            seen["mm_token_type_ids"] = (full == multimodal.IMAGE_TOKEN).int()
        with torch.inference_mode():
            logits = model(input_ids=full, **seen).logits[0]
        assert logits[len(tokens) - 1 :].argmax(-1).tolist() == output


def test_recordings_in_a_mixed_batch(tmp_path: Path) -> None:
    folder = multimodal.tiny_whisper(tmp_path / "model")
    prompts = [[257, 258], [257, 258, 259], [257, 258, 259, 264], [257]]
    one = {"prompts": prompts, "sampling": GREEDY, "heard": [0, 1, 2, 3]}
    done = run_engine(tmp_path, folder, [one], **SETTINGS | {"max_model_len": 64, "max_num_batched_tokens": 1600})
    check(done)
    outputs = done.tokens(0)
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


def check(run: EngineRun) -> None:
    """Assert that the device, and its graphs, did it."""
    assert run.platform == "npu"
    assert run.graphs_captured


def with_image(ids: list[int], processor: Any, seed: int) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt with as many image tokens as the image has, and what the model sees of it."""
    pixels = processor(multimodal.image(seed), return_tensors="pt")
    grid = pixels.get("image_grid_thw")
    count = multimodal.IMAGE_TOKENS if grid is None else int(grid.prod()) // processor.merge_size**2
    place = ids.index(multimodal.IMAGE_TOKEN)
    return ids[:place] + [multimodal.IMAGE_TOKEN] * count + ids[place + 1 :], dict(pixels)
