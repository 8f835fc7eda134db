"""A small random PaliGemma, and who judges what it says: an image goes before its text, and its tokens see each other.

transformers lets the text of a prompt see what comes later in it as well, which vLLM does on no device: the judge is told
that only the image is such a prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

from tests.support import multimodal
from tests.support.multimodal import IMAGE_TOKEN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.judges import Judge

__all__ = ["judge", "tiny_paligemma"]

_BEGIN, _LINE = 1, 8  # what stands behind the image, and behind the text
_PATCH, _PATCHES = 14, 16
_SIDE = 4 * _PATCH
_TEXT = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": _SIDE,
    "patch_size": _PATCH,
    "vision_use_head": False,
}


def tiny_paligemma(folder: Path) -> Path:
    """SigLIP's tower, one matrix that brings its patches to the text's width, and Gemma."""
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION),
        text_config=transformers.GemmaConfig(**_TEXT, bos_token_id=_BEGIN, eos_token_id=2, pad_token_id=0),
        image_token_index=IMAGE_TOKEN,
        projection_dim=_TEXT["hidden_size"],
        hidden_size=_TEXT["hidden_size"],
        vocab_size=_TEXT["vocab_size"],
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.PaliGemmaForConditionalGeneration(config)
        model.model.multi_modal_projector.linear.weight.normal_(std=0.5)
        model.model.language_model.embed_tokens.weight.div_(8)  # else a token only repeats itself
        model.model.language_model.norm.weight.fill_(7)
    model.save_pretrained(folder)
    multimodal.name_as_on_the_hub(folder / "model.safetensors")
    tokenizer = multimodal.word_tokenizer({"<image>": IMAGE_TOKEN, "\n": _LINE}, {"image_token": "<image>"})
    images = transformers.SiglipImageProcessor(size={"height": _SIDE, "width": _SIDE})
    images.image_seq_length = _PATCHES
    transformers.PaliGemmaProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def judge(folder: Path, *, causal: bool = False) -> Judge:
    """Judge prompts with an image or none, as :mod:`tests.support.judges` does; `causal`: no token sees a later one."""
    made = transformers.PaliGemmaForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    images = transformers.SiglipImageProcessor(size={"height": _SIDE, "width": _SIDE})

    def say(request: dict[str, Any], output: list[int]) -> torch.Tensor:
        tokens, seen = request["prompts"], {}
        if request["seen"] is not None:
            tokens = [IMAGE_TOKEN] * _PATCHES + [_BEGIN, *tokens, _LINE]
            seen = images(multimodal.image(request["seen"]), return_tensors="pt")
        ids = torch.tensor([tokens + output[:-1]])
        types = torch.ones_like(ids) if causal else (ids != IMAGE_TOKEN).int()  # of a prefix they are 0
        logits = made(input_ids=ids, token_type_ids=types, **seen).logits
        return logits[0, -len(output) :].float().log_softmax(-1)

    return torch.inference_mode()(say)
