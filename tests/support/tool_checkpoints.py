"""Reads checkpoints that tools wrote, and writes what they mean into `exact`, as tests.support.quantized does of its own.

compressed-tensors' own library unpacks its formats, and ModelOpt's by its own names; what bitsandbytes means lies beside
(tests.support.format_tools). AWQ and GPTQ are unpacked here from their description.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from tests.support import modelopt, quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["PYTHON", "make"]

PYTHON = Path(__file__).parents[2] / ".nox" / "format-tools" / "bin" / "python"
"""Of an environment with the tools."""
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
_INPUTS_BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_FARTHEST = 0.25  # from a weight as it was, of all: 4 bits without calibration change them by an eighth


def make(folder: Path, names: Sequence[str], model: Path = quantized.DEMO) -> dict[str, Path]:
    """Let the tools write checkpoints of a model; return their folders by name."""
    program = Path(__file__).with_name("format_tools.py")
    # -P: one of the tools has the name of a file beside the program
    done = subprocess.run([PYTHON, "-P", program, model, folder, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in names:
        _write_exact(folder / name, model)
    return {name: folder / name for name in names}


def _write_exact(folder: Path, model: Path) -> None:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored, exact = load_file(folder / "model.safetensors"), {}
    read, inputs = _READERS[config["quant_method"]](config, folder)
    for name, weight in load_file(model / "model.safetensors").items():
        exact[name] = weight
        if quantized.LINEAR.search(name):
            stem = name.removesuffix("weight")
            parts = {key.removeprefix(stem): part for key, part in stored.items() if key.startswith(stem)}
            exact[name] = read(name, parts).float().contiguous()
            off = (exact[name] - weight.float()).norm() / weight.float().norm()
            assert 0 < off < _FARTHEST, f"{name} was misread: {off}"
    if config["quant_method"] == "compressed-tensors" and _scheme(config).weights.strategy == "tensor":
        _round_again(exact)
    (folder / "exact").mkdir()
    save_file(exact, folder / "exact" / "model.safetensors", metadata={"format": "pt"})
    (folder / "exact" / "inputs.json").write_text(json.dumps(inputs))
    shutil.copy(model / "config.json", folder / "exact")
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)


def _round_again(weights: dict[str, Tensor]) -> None:
    """Give the shards of a layer one scale of fp8, as vLLM does for any device (`requantize_with_max_scale`)."""
    for first, *others in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for name in [name for name in weights if f".{first}." in name]:
            shards = [name, *(name.replace(first, other) for other in others)]
            scale = max(weights[shard].abs().max() for shard in shards) / torch.finfo(torch.float8_e4m3fn).max
            for shard in shards:
                weights[shard] = (weights[shard] / scale).to(torch.float8_e4m3fn).float() * scale


Reader = tuple["Callable[[str, dict[str, Tensor]], Tensor]", dict[str, Any]]
"""What reads a matrix by its name and parts; and how activations are rounded, by a pattern of layers."""


def _compressed(config: dict[str, Any], _: Path) -> Reader:
    scheme = _scheme(config)
    rounded = scheme.input_activations is not None and not quantized.keeps_activations(scheme)
    inputs = {quantized.ALL: json.loads(scheme.input_activations.model_dump_json())} if rounded else {}
    return lambda _, parts: _decompressed(parts, scheme), inputs


def _scheme(config: dict[str, Any]) -> QuantizationScheme:
    (group,) = config["config_groups"].values()
    return QuantizationScheme(**group)


def _decompressed(parts: dict[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    wide = {key: part.float() if part.dtype == torch.bfloat16 else part for key, part in parts.items()}
    return quantized.decompressed(wide, scheme)


def _modelopt(config: dict[str, Any], _: Path) -> Reader:
    algorithm = config["quant_algo"]
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return lambda _, parts: parts["weight"].float() * parts["weight_scale"][:, None], {
            quantized.ALL: _INPUTS_BY_TOKEN
        }
    if algorithm == "fp8_pb_wo":
        inputs = {quantized.ALL: _INPUTS_BY_TOKEN | {"strategy": "group", "group_size": 128}}  # vLLM rounds them
        return lambda _, parts: parts["weight"].float() * _of_blocks(parts["weight_scale"][:, 0, :, 0]), inputs
    inputs = modelopt.INPUTS[algorithm]
    return lambda _, parts: modelopt.meant(parts, algorithm), {} if inputs is None else {quantized.ALL: inputs}


def _of_blocks(scale: Tensor) -> Tensor:
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def _gptq(config: dict[str, Any], _: Path) -> Reader:
    return lambda _, parts: _integers(_nibbles(parts["qweight"], 0), _nibbles(parts["qzeros"], 1) + 1, parts), {}


def _awq(config: dict[str, Any], _: Path) -> Reader:
    order = lambda packed: _nibbles(packed, 1).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)  # noqa: E731
    return lambda _, parts: _integers(order(parts["qweight"]), order(parts["qzeros"]), parts), {}


def _auto_round(config: dict[str, Any], folder: Path) -> Reader:
    return (_awq if config["packing_format"] == "auto_round:auto_awq" else _gptq)(config, folder)


def _integers(codes: Tensor, zeros: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """codes: [K, N]; zeros and the scales in parts: [groups, N]."""
    size = len(codes) // len(zeros)
    groups = parts.get("g_idx", torch.arange(len(codes)) // size).long()
    return ((codes - zeros[groups]) * parts["scales"].float()[groups]).t()


def _nibbles(packed: Tensor, dim: int) -> Tensor:
    """int32 -> eight integers each along `dim`, the lowest bits first."""
    parts = [(packed >> shift) & 15 for shift in range(0, 32, 4)]
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)


def _bitsandbytes(_: dict[str, Any], folder: Path) -> Reader:
    meant = load_file(folder / "meant" / "weights.safetensors")
    return lambda name, _: meant[name], {}


_READERS: dict[str, Callable[[dict[str, Any], Path], Reader]] = {
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
}
