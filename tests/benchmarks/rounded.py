"""Owns the models with rounded weights that benchmarks compare: ours in compressed-tensors' formats, llama.cpp's in its own.

llama.cpp keeps the head of a model in 6 bits where the layers have 4, and rounds what meets the weights to 8 bits. Ours reads the
head as the checkpoint has it: once in bfloat16, tied to the embedding, and once in 8 bits.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = NAME, FP8, INT8 = "4-bit", "fp8", "int8"
PACKED, HEAD_OF_8_BITS = "W4A16", "W4A16, head of 8 bits"
GGUF = ("Q4_0", "Q4_K_M")
LAYERS = r".*layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj)"
_INTEGERS: dict[str, Any] = {"type": "int", "symmetric": True}
SCHEMES: dict[str, dict[str, Any]] = {
    "W8A8": {
        "weights": {"num_bits": 8, "strategy": "channel", **_INTEGERS},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True, **_INTEGERS},
        "format": "int-quantized",
    },
    "W4A16": {
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 128, **_INTEGERS},
        "format": "pack-quantized",
    },
}
_HEAD: dict[str, Any] = {"weights": {"num_bits": 8, "strategy": "channel", **_INTEGERS}, "format": "pack-quantized"}


def write_models(folder: Path, weights: str, programs: str | None) -> None:
    """Round the checkpoint in the folder, to 4 bits its model.gguf too, with llama.cpp's program where there is one."""
    from tests.support import quantized

    if weights != NAME:
        place = folder / weights
        if weights == FP8:
            quantized.fp8_blocks(place, folder)
        else:
            quantized.compressed(place, {LAYERS: SCHEMES["W8A8"]}, folder)
        shutil.rmtree(place / "exact", ignore_errors=True)
        return
    schemes = {LAYERS: SCHEMES[PACKED]}
    quantized.compressed(folder / PACKED, schemes, folder)
    quantized.compressed(folder / HEAD_OF_8_BITS, schemes | {"lm_head": _HEAD}, folder)
    for place in (folder / PACKED, folder / HEAD_OF_8_BITS):
        shutil.rmtree(place / "exact", ignore_errors=True)  # the same model in float32, which nobody asks for here
    for kind in GGUF if programs else ():
        command = [str(Path(programs or "") / "llama-quantize"), folder / "model.gguf", folder / f"{kind}.gguf", kind]
        subprocess.run(command, check=True, capture_output=True)
