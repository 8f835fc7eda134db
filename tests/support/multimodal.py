"""Makers of small random models that see or hear, with processors of their own, and what they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from pathlib import Path

SAMPLING_RATE = 16000  # of recordings, per second
IMAGE_TOKEN = 3
IMAGE_TOKENS = 16  # that the processor puts in the place of one

_VOCABULARY = 512
_SPREAD = 0.1
_PIXELS, _PATCH = 56, 14
_QWEN_SPECIAL = {"<|image_pad|>": IMAGE_TOKEN, "<|vision_start|>": 4, "<|vision_end|>": 5, "<|video_pad|>": 6}
_QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
    "video_token_id": 6,
    "tie_word_embeddings": False,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "out_hidden_size": 256,
    "initializer_range": _SPREAD,
}
_QWEN_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": _SPREAD,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA_SOFT, _GEMMA_END, _GEMMA_LINES = 6, 7, 9  # the image's tokens, what ends it, and the empty line around it
_GEMMA_SPECIAL = {"<image>": IMAGE_TOKEN, "<soft>": _GEMMA_SOFT, "<end>": _GEMMA_END} | {
    "\n" * count: 7 + count for count in (1, 2, 3, 4)
}
_SPEECH_TOKENS = ("endoftext", "startoftranscript", "en", "transcribe", "translate", "startofprev", "startoflm")


def image(seed: int) -> Image.Image:
    """Return noise, of another shape for each seed."""
    pixels = np.random.default_rng(seed).random((_PIXELS + 24 * seed, _PIXELS + 10 * seed, 3))
    return Image.fromarray((255 * pixels).astype(np.uint8))


def recording(seed: int) -> np.ndarray:
    """Return float32 noise of `seed` + 1 seconds."""
    return np.random.default_rng(seed).standard_normal(SAMPLING_RATE * (seed + 1)).astype(np.float32)


def video(seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Return two frames of noise, half a second apart, and what vLLM wants to know of them."""
    frames = (255 * np.random.default_rng(seed).random((2, _PIXELS, _PIXELS + 10 * seed, 3))).astype(np.uint8)
    said = {"fps": 2.0, "duration": 1.0, "total_num_frames": 2, "frames_indices": [0, 1], "video_backend": "opencv"}
    return frames, said | {"do_sample_frames": False}


def prompt(
    ids: list[int], seen: int | None = None, heard: int | None = None, watched: int | None = None
) -> dict[str, Any]:
    """Return vLLM's form of a prompt with an image or video (a decoder's), a recording (an encoder's), or none."""
    if watched is not None:
        return {"prompt_token_ids": ids, "multi_modal_data": {"video": video(watched)}}
    if seen is not None:
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": image(seen)}}
    if heard is not None:
        encoder = {"prompt": "", "multi_modal_data": {"audio": (recording(heard), SAMPLING_RATE)}}
        return {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": ids}}
    return {"prompt_token_ids": ids}


def tiny_llava(folder: Path, *, max_position_embeddings: int = 512) -> Path:
    """LLaVA: CLIP's vision tower, a projector, Llama."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=_PIXELS,
        patch_size=_PATCH,
        initializer_range=_SPREAD,
    )
    text = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=_SPREAD,
        max_position_embeddings=max_position_embeddings,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    name_as_on_the_hub(folder / "model.safetensors")
    _llava_processor().save_pretrained(folder)
    return folder


def tiny_qwen2_5_vl(folder: Path, **changes: Any) -> Path:
    """Qwen2.5-VL: patches of space and time, windows of attention, positions of three numbers; `changes` to the text's."""
    vision = _QWEN_VISION | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    text = _QWEN_TEXT | {"rope_parameters": _positions([4, 6, 6])} | changes
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **_QWEN_TOKENS)
    processor = (transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor, 14)
    return _save_qwen(transformers.Qwen2_5_VLForConditionalGeneration, config, processor, folder)


def tiny_qwen3_vl(folder: Path, **changes: Any) -> Path:
    """Qwen3-VL: learned positions of patches, features of the tower's layers added to those of the text, interleaved
    sections of rotary positions; `changes` to the text's configuration.
    """
    vision = _QWEN_VISION | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = _QWEN_TEXT | {"head_dim": 32, "rope_parameters": _positions([6, 5, 5]) | {"mrope_interleaved": True}}
    config = transformers.Qwen3VLConfig(vision_config=vision, text_config=text | changes, **_QWEN_TOKENS)
    processor = (transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor, 16)
    return _save_qwen(transformers.Qwen3VLForConditionalGeneration, config, processor, folder)


def tiny_gemma3_seeing(folder: Path) -> Path:
    """Gemma 3: the tokens of an image see each other, beyond a window that is a little longer than they are."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=112,
        patch_size=_PATCH,
    )
    text = _QWEN_TEXT | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": IMAGE_TOKENS + 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = transformers.Gemma3Config(
        vision_config=vision,
        text_config=transformers.Gemma3TextConfig(**text),
        mm_tokens_per_image=IMAGE_TOKENS,
        boi_token_index=IMAGE_TOKEN,
        eoi_token_index=_GEMMA_END,
        image_token_index=_GEMMA_SOFT,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.5)
        model.model.language_model.embed_tokens.weight.div_(8)  # else a token only repeats itself
        model.model.language_model.norm.weight.fill_(7)
    model.save_pretrained(folder)
    name_as_on_the_hub(folder / "model.safetensors")
    names = {"boi_token": "<image>", "image_token": "<soft>", "eoi_token": "<end>"}
    tokenizer = word_tokenizer(_GEMMA_SPECIAL, names)
    images = transformers.Gemma3ImageProcessor(size={"height": 112, "width": 112})
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=IMAGE_TOKENS).save_pretrained(folder)
    return folder


def shown(model_type: str, count: int) -> list[int]:
    """Return the tokens that the processor of a model puts in the place of its one image token, `count` of the image."""
    if model_type != "gemma3":
        return [IMAGE_TOKEN] * count
    return [_GEMMA_LINES, IMAGE_TOKEN, *[_GEMMA_SOFT] * count, _GEMMA_END, _GEMMA_LINES]


def token_types(model_type: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what tells the model which of the tokens [1, length] are the image's, where it wants to know."""
    if model_type == "gemma3":
        return {"token_type_ids": (ids == _GEMMA_SOFT).int()}
    return {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if model_type.startswith("qwen") else {}


def tiny_whisper(folder: Path) -> Path:
    """Whisper: convolutions and encoder over 30 seconds of sound, decoder with cross attention."""
    vocabulary = {character: index for index, character in enumerate(bytes_to_unicode().values())}
    special = [f"<|{name}|>" for name in (*_SPEECH_TOKENS, "nospeech", "notimestamps")]
    vocabulary |= {name: len(vocabulary) + index for index, name in enumerate(special)}
    end = vocabulary["<|endoftext|>"]
    config = transformers.WhisperConfig(
        vocab_size=_VOCABULARY,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        init_std=_SPREAD,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=vocabulary["<|startoftranscript|>"],
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():  # so that what is heard decides what is said
        for layer in model.model.decoder.layers:
            layer.encoder_attn.v_proj.weight *= 4
            layer.encoder_attn.q_proj.weight *= 8
    model.save_pretrained(folder)
    tokenizer = transformers.WhisperTokenizerFast(
        vocab=vocabulary,
        merges=[],
        unk_token=special[0],
        bos_token=special[0],
        eos_token=special[0],
        additional_special_tokens=special[1:],
    )
    transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder


def _positions(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


def _save_qwen(model: type, config: Any, processor: tuple[Any, Any, int], folder: Path) -> Path:
    make, video, patch = processor
    torch.manual_seed(0)
    model(config).save_pretrained(folder)
    side = 2 * patch  # of what becomes one token
    pixels = {"shortest_edge": side * side, "longest_edge": 16 * side * side}
    images = transformers.Qwen2VLImageProcessor(size=pixels, patch_size=patch)
    made = make(image_processor=images, tokenizer=word_tokenizer(_QWEN_SPECIAL), video_processor=video())
    made.save_pretrained(folder)
    return folder


def word_tokenizer(
    special: dict[str, int], names: dict[str, str] | None = None
) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of made-up words; `names`: attributes of the tokenizer that some special tokens have."""
    words = {f"t{index}": index for index in range(_VOCABULARY) if index not in special.values()} | special
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="t0",
        bos_token="t1",
        eos_token="t2",
        additional_special_tokens=list(special),
        model_specific_special_tokens=names or {},
    )


def _llava_processor() -> transformers.LlavaProcessor:
    pixels = {"size": {"shortest_edge": _PIXELS}, "crop_size": {"height": _PIXELS, "width": _PIXELS}}
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(**pixels),
        tokenizer=word_tokenizer({"<image>": IMAGE_TOKEN}),
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def name_as_on_the_hub(file: Path) -> None:
    """Give a tower's weights the older names, which checkpoints have; vLLM's LLaVA knows no names of transformers 5."""
    weights = load_file(file)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})
