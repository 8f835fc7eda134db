"""The fingerprint of a model and of the layout of its blocks: equal where bytes may be exchanged, and only there.

Blocks are found by hashes of tokens, adapter and salt. That hash says nothing about weights, dtypes or strides, so all
else that decides a block's bytes is in here; servers whose fingerprints differ do not see each other's blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from npu_kvconnector.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["SETTINGS", "describe", "fingerprint", "settings_digest", "weights_digest"]

SETTINGS = "npu_kv_settings"
"""Where the connector puts :func:`settings_digest` into ``kv_connector_extra_config``; no user may write it."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files beside the weights that say how they compute, and what becomes of an image before an encoder sees it."""
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_NOT_OF_THE_MODEL = ("transformers_version", "torch_dtype")
"""What a model's configuration says of the program that wrote it, or twice; names with a _ before them likewise."""
_RANKS = ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")


def fingerprint(config: OffloadingConfig, *, block_bytes: int, revision: str = "") -> bytes:
    """Return the 32 bytes that stand for :func:`describe`.

    Raises:
        OptionError: the weights cannot be told from others of the same name.
    """
    text = json.dumps(describe(config, block_bytes=block_bytes, revision=revision), sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def describe(config: OffloadingConfig, *, block_bytes: int, revision: str = "") -> dict[str, object]:
    """Return what decides the bytes of a block, as JSON can hold it.

    Args:
        config: vLLM's description of the deployment.
        block_bytes: of one block of the host tier, all workers' shares and padding together.
        revision: of the weights, where the user names one; else they are sampled.
    """
    parallel = dataclasses.asdict(config.parallel)
    portable = config.parallel.is_parallelism_agnostic or config.replicated_layout
    return {
        "weights": revision or weights_digest(config.model.name),
        "settings": config.extra_config.get(SETTINGS, ""),
        "dtype": config.model.dtype,
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "block_bytes": block_bytes,
        "parallel": None if portable else {name: parallel[name] for name in _RANKS},
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "layout": config.kv_cache_layout,
    }


def settings_digest(model: ModelConfig | None) -> str:
    """Return a digest of how an engine computes with weights: what it was told, not what their folder says.

    It is the same in all processes of a server and after a restart, wherever the model lies: ``hf_overrides``,
    quantisation when the weights are loaded, ``mm_processor_kwargs`` and the like are in it, names of places are not.
    """
    if model is None:
        return ""
    said = {
        "model": _plain(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "quantization_config": _plain(model.quantization_config),
        "disable_sliding_window": model.disable_sliding_window,
    }
    # A block's hash knows an image as it came, not what a server's processor makes of it.
    if model.multimodal_config is not None and model.multimodal_config.mm_processor_kwargs:
        said["mm_processor_kwargs"] = _plain(model.multimodal_config.mm_processor_kwargs)
    text = json.dumps(said, sort_keys=True)
    if '"longrope"' in text:  # whose factors follow from it
        text += str(model.max_model_len)
    return hashlib.sha256(text.encode()).hexdigest()


def weights_digest(model: str) -> str:
    """Return a digest of the weights of a local folder or file, or of a model in Hugging Face's cache.

    Each file is sampled in 256 places of 4 KiB: fine-tuned weights have the same names, shapes and sizes, but differ
    nearly everywhere.

    Raises:
        OptionError: the cache holds several revisions of the model, or none.
    """
    place = Path(model)
    if not place.exists():
        place = _snapshot(model)
    files = [place] if place.is_file() else sorted({path for kind in _WEIGHTS for path in place.glob(kind)})
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for sample in _samples(path):
            digest.update(sample)
    settings = [place / name for name in _SETTINGS if (place / name).is_file()]
    for path in settings:
        digest.update(path.read_bytes())
    if not files and not settings:
        msg = f"no weights were found in {model}: set revision in the tier's options to what names them"
        raise OptionError(msg)
    return digest.hexdigest()


def _plain(value: object) -> object:
    """Return a configuration as JSON can hold it, the same in each process: no order of sets, addresses or places."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to_dict"):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        kept = {str(key): each for key, each in value.items() if key not in _NOT_OF_THE_MODEL}
        return {key: _plain(each) for key, each in kept.items() if not key.startswith("_")}
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(each), sort_keys=True) for each in value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    kind = value if isinstance(value, type) else type(value)
    return str(value) if kind.__module__ == "torch" else f"{kind.__module__}.{kind.__qualname__}"


def _samples(path: Path) -> Iterable[bytes]:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for number in range(_SAMPLES):
            start = max(size - _SAMPLE_BYTES, 0) * number // (_SAMPLES - 1)
            yield os.pread(file.fileno(), _SAMPLE_BYTES, start)
            if size <= _SAMPLE_BYTES:
                return


def _snapshot(model: str) -> Path:
    """Return the only folder of the model in Hugging Face's cache; which one of several is served is not known here."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "snapshots"
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    if len(found) != 1:
        msg = (
            f"{len(found)} revisions of {model} are in Hugging Face's cache ({folder}): "
            "set revision in the tier's options to the one that is served"
        )
        raise OptionError(msg)
    return found[0]
