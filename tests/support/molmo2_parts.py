"""What comes with a checkpoint of Molmo 2 as code: its configuration and its processor; copied beside the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
from transformers.configuration_utils import PretrainedConfig

PATCH, SIDE, POOLED = 8, 4, 2
"""Pixels of a patch's side, patches of a crop's, and what they are pooled to."""


class Molmo2Part(PretrainedConfig):
    """The configuration of the tower, the adapter or the decoder."""

    model_type = "molmo2_part"


class Molmo2Config(PretrainedConfig):
    """The configuration of the whole."""

    model_type = "molmo2"

    def __init__(
        self, vit_config: Any = None, adapter_config: Any = None, text_config: Any = None, **rest: Any
    ) -> None:
        """Take the parts as tables."""
        self.vit_config, self.adapter_config, self.text_config = (
            Molmo2Part(**(part or {})) for part in (vit_config, adapter_config, text_config)
        )
        super().__init__(**rest)

    def get_text_config(self, *_: Any, **__: Any) -> Molmo2Part:
        """Return the decoder's."""
        return self.text_config


class Molmo2Processor(ProcessorMixin):
    """Two crops of an image: the whole of it, and the same patches from the last to the first. One of a video's frame."""

    image_use_col_tokens = use_single_crop_start_token = use_frame_special_tokens = True
    video_use_col_tokens = False
    use_single_crop_col_tokens = None

    def __init__(self, tokenizer: Any) -> None:
        """Say of images and videos what vLLM asks."""
        sizes = {"patch_size": PATCH, "size": {"height": PATCH * SIDE, "width": PATCH * SIDE}, "pooling_size": (2, 2)}
        self.tokenizer = tokenizer
        self.image_processor = SimpleNamespace(max_crops=1, overlap_margins=(0, 0), **sizes)
        self.video_processor = SimpleNamespace(num_frames=2, **sizes)

    @classmethod
    def from_pretrained(cls, folder: str, tokenizer: Any = None, **_: Any) -> Molmo2Processor:
        """Take vLLM's tokenizer, or the folder's."""
        return cls(tokenizer or PreTrainedTokenizerFast.from_pretrained(folder))

    def __call__(self, text: str | None = None, images: Any = None, videos: Any = None, **_: Any) -> BatchFeature:
        """Return the tokens and the crops."""
        made = {"input_ids": torch.tensor([self.tokenizer.encode(text or "")])}
        if images:
            crops = [crop for image in images for crop in crops_of(image)]
            made |= {
                "pixel_values": torch.stack(crops),
                "image_token_pooling": pooled(torch.arange(2 * SIDE * SIDE)).repeat(len(images), 1),
                "image_grids": torch.tensor([[POOLED] * 4] * len(images)),
                "image_num_crops": torch.tensor([2] * len(images)),
            }
        if videos:  # one, as vLLM asks
            crops = crops_of_video(videos[0][0])
            made |= {
                "pixel_values_videos": torch.stack(crops),
                "video_token_pooling": pooled(torch.arange(len(crops) * SIDE * SIDE)),
                "video_grids": torch.tensor([[len(crops), POOLED, POOLED]]),
            }
        return BatchFeature(made)


def crops_of(image: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches of both crops, each [patches, values]."""
    patches = _patches(image)
    return patches, patches.flip(0)


def crops_of_video(frames: np.ndarray) -> list[torch.Tensor]:
    """Return the patches of each frame, of [frames, height, width, 3]."""
    return [_patches(Image.fromarray(frame)) for frame in frames]


def pooled(patches: torch.Tensor) -> torch.Tensor:
    """Group the patches of some crops, [all, ...], as they are pooled: [tokens, group, ...]."""
    grid = patches.reshape(-1, POOLED, SIDE // POOLED, POOLED, SIDE // POOLED, *patches.shape[1:])
    return grid.transpose(2, 3).reshape(-1, (SIDE // POOLED) ** 2, *patches.shape[1:])


def _patches(image: Any) -> torch.Tensor:
    pixels = np.asarray(image.resize((PATCH * SIDE, PATCH * SIDE)), dtype=np.float32) / 127.5 - 1
    return torch.from_numpy(pixels.copy()).view(SIDE, PATCH, SIDE, PATCH, 3).transpose(1, 2).reshape(SIDE**2, -1)
