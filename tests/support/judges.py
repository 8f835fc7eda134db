"""Who judges: what transformers says about the continuation of a request, for each kind of request and any dtype.

A request is what ``tests.support.engine_run`` sends for one prompt: its ids in ``"prompts"``, and maybe the number of
its image in ``"seen"``, of its video in ``"watched"``, of its recording in ``"heard"``, or the folder of its adapter in ``"lora"``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support import adapters, multimodal
from tests.support.transformers_reference import load, next_token_logprobs, sure_of_experts

__all__ = [
    "Embedder",
    "Judge",
    "embedder",
    "of_adapters",
    "of_experts",
    "of_images",
    "of_recordings",
    "of_seeing",
    "of_text",
    "requests",
    "sorter",
]

Judge = Callable[[dict[str, Any], list[int]], torch.Tensor]
"""Takes a request and its continuation; returns float32 [len(continuation), vocabulary], the logprobs at each step."""

Embedder = Callable[[dict[str, Any]], torch.Tensor]
"""Takes a request; returns a float32 vector of its prompt: the embedding, of length 1, or a probability for each label."""


def requests(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the requests of a round."""
    keys = [key for key in ("prompts", "seen", "watched", "heard", "lora") if key in one]
    return [dict(zip(keys, values, strict=True)) for values in zip(*(one[key] for key in keys), strict=True)]


def of_text(folder: Path, dtype: torch.dtype = torch.float32) -> Judge:
    """Judge prompts of text."""
    return of_model(load(folder, dtype))


def of_model(model: torch.nn.Module, cache: Callable[[], transformers.Cache] | None = None) -> Judge:
    """Judge prompts of text by a transformers model; `cache` makes what it keeps keys and values in."""

    def judge(request: dict[str, Any], output: list[int]) -> torch.Tensor:
        kept = {} if cache is None else {"past_key_values": cache()}
        return next_token_logprobs(model, request["prompts"], output, **kept)

    return judge


def of_experts(model: torch.nn.Module, margin: float) -> Judge:
    """Judge not the tokens but, as bool [len(continuation)], whether a mixture's experts are chosen by such a margin."""

    def judge(request: dict[str, Any], output: list[int]) -> torch.Tensor:
        return sure_of_experts(model, request["prompts"], output, margin)

    return judge


def of_adapters(folder: Path, dtype: torch.dtype = torch.float32) -> Judge:
    """Judge prompts of text, each with its adapter merged into the model, or with none."""
    model = load(folder, dtype)
    judges = {None: of_model(model)}

    def judge(request: dict[str, Any], output: list[int]) -> torch.Tensor:
        name = request.get("lora")
        if name not in judges:
            judges[name] = of_model(adapters.merged(model, Path(name)))
        return judges[name](request, output)

    return judge


def of_images(folder: Path, dtype: torch.dtype = torch.float32) -> Judge:
    """Judge prompts of text with an image or none."""
    reference = transformers.AutoModelForImageTextToText
    return of_seeing(reference.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval(), folder)


def of_seeing(model: Any, folder: Path) -> Judge:
    """Judge prompts of text with an image or none by a transformers model; the folder has its processor."""
    processor = transformers.AutoProcessor.from_pretrained(folder).image_processor
    kind = model.config.model_type

    def judge(request: dict[str, Any], output: list[int]) -> torch.Tensor:
        tokens, seen = request["prompts"], {}
        if request["seen"] is not None:
            tokens, seen = _with_image(tokens, processor, request["seen"], kind)
            seen["pixel_values"] = seen["pixel_values"].to(model.dtype)
        full = torch.tensor([tokens + output[:-1]])
        if seen:
            seen |= multimodal.token_types(kind, full)
        return _logprobs(model(input_ids=full, **seen), len(output))

    return torch.inference_mode()(judge)


def of_recordings(folder: Path, dtype: torch.dtype = torch.float32) -> Judge:
    """Judge what a decoder writes about a recording."""
    reference = transformers.WhisperForConditionalGeneration
    model = reference.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)

    def judge(request: dict[str, Any], output: list[int]) -> torch.Tensor:
        sound = multimodal.recording(request["heard"])
        heard = extractor(sound, sampling_rate=multimodal.SAMPLING_RATE, return_tensors="pt").input_features
        ids = torch.tensor([request["prompts"] + output[:-1]])
        return _logprobs(model(input_features=heard.to(dtype), decoder_input_ids=ids), len(output))

    return torch.inference_mode()(judge)


def embedder(folder: Path, dtype: torch.dtype = torch.float32, pool: str = "first") -> Embedder:
    """Return the encoder's embedding of a prompt: the first or last token's, of length 1, or the mean as it is."""
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()

    def embed(request: dict[str, Any]) -> torch.Tensor:
        tokens = model(torch.tensor([request["prompts"]])).last_hidden_state[0].float()
        if pool == "mean":
            return tokens.mean(0)
        return torch.nn.functional.normalize(tokens[0 if pool == "first" else -1], dim=0)

    return torch.inference_mode()(embed)


def sorter(folder: Path, dtype: torch.dtype = torch.float32) -> Embedder:
    """Return what gives each label's probability for a prompt."""
    reference = transformers.AutoModelForSequenceClassification
    model = reference.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()

    def sort(request: dict[str, Any]) -> torch.Tensor:
        return model(torch.tensor([request["prompts"]])).logits[0].float().softmax(0)

    return torch.inference_mode()(sort)


def _logprobs(answer: Any, steps: int) -> torch.Tensor:
    return answer.logits[0, -steps:].float().log_softmax(-1)


def _with_image(ids: list[int], processor: Any, seed: int, model_type: str) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt with as many image tokens as the image has, and what the model sees of it."""
    pixels = processor(multimodal.image(seed), return_tensors="pt")
    grid = pixels.get("image_grid_thw")
    count = multimodal.IMAGE_TOKENS if grid is None else int(grid.prod()) // processor.merge_size**2
    place = ids.index(multimodal.IMAGE_TOKEN)
    known = {name: pixels[name] for name in ("pixel_values", "image_grid_thw") if name in pixels}
    return ids[:place] + multimodal.shown(model_type, count) + ids[place + 1 :], known
