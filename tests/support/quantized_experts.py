"""Makes mixtures of experts quantised in their on-disk formats, and beside them in `exact` what they mean.

Only the experts' weights are quantised. The rounding and packing are those of tests.support.quantized.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.support import modelopt, models, quark
from tests.support.quantized import (
    NVFP4_RANGE,
    WIDEST,
    RoundedExperts,
    Rounding,
    auto_round_config,
    auto_round_says,
    auto_round_tensors,
    awq_tensors,
    decompressed,
    gptq_tensors,
    mxfp4,
    rounding_of,
    weight_qparams,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

__all__ = [
    "auto_round",
    "awq",
    "by_modelopt",
    "by_quark",
    "compressed",
    "eight",
    "exact_model",
    "gpt_oss",
    "gptq",
    "mixed_by_modelopt",
    "packed",
    "unquantized",
]

STATIC_SCALE = modelopt.STATIC_SCALE
EXPERT = re.compile(r"\.experts\.\d+\.\w+_proj\.weight$")


def awq(folder: Path, rounding: Rounding) -> Path:
    """AWQ's layout."""
    config = {"quant_method": "awq", "bits": 4, "group_size": rounding.group, "zero_point": True, "version": "gemm"}
    return _qwen3(folder, lambda name, w: awq_tensors(name, rounding(w)), config, num_hidden_layers=2)


def gptq(folder: Path, roundings: list[Rounding]) -> Path:
    """GPTQ's layout, without activation order: a rounding for the experts of each layer, of others than the first by
    rules for the names of their projections.
    """
    first, *others = roundings
    rules = {
        rf".*layers\.{layer}\..*experts\.\d+\.(gate|up|down)_proj": _gptq_says(rounding)
        for layer, rounding in enumerate(others, 1)
    }
    config = {"quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": False, "lm_head": False}
    config |= _gptq_says(first) | {"dynamic": rules}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rounding = roundings[_layer(name)]
        return gptq_tensors(name, rounding(weight), rounding.bits)

    return _qwen3(folder, write, config, num_hidden_layers=len(roundings))


def _gptq_says(rounding: Rounding) -> dict[str, Any]:
    return {"bits": rounding.bits, "group_size": rounding.group, "sym": rounding.symmetric}


def packed(bits: int, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    """Return a scheme of compressed-tensors whose weights are integers packed into int32."""
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **more}
    return {"weights": weights, "format": "pack-quantized"}


def eight(kind: str, weights: str, inputs: str, **more: Any) -> dict[str, Any]:
    """Return a scheme of compressed-tensors with weights and inputs of eight bits."""
    base = {"num_bits": 8, "type": kind, "symmetric": True}
    size = {"group_size": 128} if inputs == "group" else {}
    return {
        "weights": {**base, "strategy": weights, **more},
        "input_activations": {**base, "strategy": inputs, "dynamic": inputs != "tensor", **size},
        "format": "int-quantized" if kind == "int" else "float-quantized",
    }


def compressed(folder: Path, schemes: list[dict[str, Any]]) -> Path:
    """compressed-tensors: a scheme for the experts of each layer."""
    made = [
        QuantizationScheme(targets=[rf"re:.*layers\.{layer}\.mlp\.experts.*"], **scheme)
        for layer, scheme in enumerate(schemes)
    ]

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scheme = made[_layer(name)]
        scale, zero = weight_qparams(weight.float(), scheme.weights)
        state = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero}
        if scheme.weights.strategy == "tensor_group":
            state["weight_global_scale"] = NVFP4_RANGE / torch.tensor([WIDEST])
            if scheme.input_activations is not None:
                state["input_global_scale"] = NVFP4_RANGE / torch.tensor([8.0])
        elif scheme.input_activations is not None and not scheme.input_activations.dynamic:
            state["input_scale"] = torch.tensor([STATIC_SCALE])
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        state = compressor.compress(state, scheme)
        return {f"{name}.{key}": tensor for key, tensor in state.items()}, decompressed(state, scheme)

    groups = {f"group_{i}": json.loads(scheme.model_dump_json(exclude_none=True)) for i, scheme in enumerate(made)}
    config = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups}
    config |= {"format": "mixed-precision", "ignore": ["lm_head"]}
    made = _qwen3(folder, write, config, num_hidden_layers=len(schemes))
    rounded = [None if scheme["weights"]["num_bits"] == 4 else scheme.get("input_activations") for scheme in schemes]
    return _note_inputs(made, rounded)


def by_modelopt(folder: Path, algorithm: str) -> Path:
    """ModelOpt's layout, by FP8, NVFP4 or MXFP8."""
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["*self_attn*", "*mlp.gate", "lm_head"]}
    write = lambda name, weight: modelopt.tensors(name, weight, algorithm)  # noqa: E731
    return _note_inputs(_qwen3(folder, write, config, num_hidden_layers=2), [modelopt.INPUTS[algorithm]] * 2)


def mixed_by_modelopt(folder: Path, algorithms: list[str]) -> Path:
    """ModelOpt's layout, by an algorithm for the experts of each layer."""
    quantised: dict[str, Any] = {}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        quantised[name] = modelopt.says(algorithms[_layer(name)])
        return modelopt.tensors(name, weight, algorithms[_layer(name)])

    config |= {"quantized_layers": quantised}
    made = _qwen3(folder, write, config, num_hidden_layers=len(algorithms))
    return _note_inputs(made, [modelopt.INPUTS[algorithm] for algorithm in algorithms])


def auto_round(folder: Path, roundings: list[Rounding]) -> Path:
    """AutoRound's own layout: a rounding for the experts of each layer, of which the first is the checkpoint's."""
    whole = [*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate"]
    names = [f"model.layers.{layer}.{name}" for layer in range(len(roundings)) for name in whole]
    extra = dict.fromkeys(names, auto_round_says(None))

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rounding = roundings[_layer(name)]
        extra[name] = auto_round_says(rounding)
        return auto_round_tensors(name, weight, rounding)

    config = auto_round_config(roundings[0], extra)
    return _qwen3(folder, write, config, num_hidden_layers=len(roundings))


def by_quark(folder: Path, schemes: list[str]) -> Path:
    """Quark's layout, by a scheme for the experts of each layer."""
    named = {f"*layers.{layer}.mlp.experts*": quark.SAYS[scheme] for layer, scheme in enumerate(schemes)}
    config = quark.config(named, ["re:.*self_attn.*", "re:.*mlp.gate$", "lm_head"])

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, exact = quark.tensors(schemes[_layer(name)], weight)
        return {f"{name}.{key}": tensor for key, tensor in stored.items()}, exact

    made = _qwen3(folder, write, config, num_hidden_layers=len(schemes))
    return _note_inputs(made, [quark.INPUTS.get(scheme) for scheme in schemes])


def unquantized(
    folder: Path, exact: Callable[[str, Tensor], Tensor], layers: int, inputs: dict[str, Any] | None = None
) -> Path:
    """A checkpoint that the engine itself quantises: `exact(name, weight)` is what comes of a weight, `inputs` how
    activations are rounded.
    """
    made = _qwen3(folder, lambda name, w: ({f"{name}.weight": w}, exact(name, w)), None, num_hidden_layers=layers)
    return _note_inputs(made, [inputs] * layers)


def exact_model(folder: Path, dtype: torch.dtype = torch.float32, ranks: int = 1) -> torch.nn.Module:
    """Return transformers' model with the dequantised weights; the experts' inputs are rounded where the engine does.

    What tensor-parallel ranks share each rounds by itself.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "exact", dtype=dtype, attn_implementation="eager"
    )
    noted = folder / "exact" / "inputs.json"
    for layer, inputs in enumerate(json.loads(noted.read_text()) if noted.exists() else []):
        if inputs is not None:
            rounds = rounding_of(QuantizationArgs(**inputs), torch.tensor(STATIC_SCALE))
            mlp = model.model.layers[layer].mlp
            mlp.experts = RoundedExperts(mlp.experts, rounds, ranks)
    return model.eval()


def gpt_oss(folder: Path) -> Path:
    """gpt-oss with MXFP4 experts, as its checkpoints store them: blocks uint8 [E, rows, K / 32, 16] and scales."""
    made = models.tiny_gpt_oss(
        folder / "exact", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    state = safetensors.torch.load_file(made / "model.safetensors")
    tensors, exact = {}, {}
    for name, value in state.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [E, K, rows]
            codes, scales, exact_value = mxfp4(value.transpose(1, 2).contiguous())
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes.unflatten(-1, (-1, 16)), scales
            exact[name] = exact_value.transpose(1, 2)
        else:
            exact[name] = tensors[name] = value.bfloat16().float()
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    config = json.loads((made / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _write(folder, tensors, exact, config, quantization)


def _layer(name: str) -> int:
    return int(name.split(".")[2])


def _note_inputs(folder: Path, inputs: list[dict[str, Any] | None]) -> Path:
    """Write how each layer's experts round their inputs, for `exact_model`."""
    (folder / "exact" / "inputs.json").write_text(json.dumps(inputs))
    return folder


def _qwen3(
    folder: Path,
    write: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    quantization: dict[str, Any] | None,
    **changes: Any,
) -> Path:
    made = models.tiny_qwen3_moe(folder / "exact", mlp_only_layers=[], moe_intermediate_size=256, **changes)
    tensors, exact = {}, {}
    for name, weight in safetensors.torch.load_file(made / "model.safetensors").items():
        rounded = weight.bfloat16().float()
        if EXPERT.search(name):
            stored, exact[name] = write(name.removesuffix(".weight"), rounded)
            tensors |= stored
        else:
            tensors[name] = exact[name] = rounded
    tensors = {n: t.bfloat16() if t.dtype == torch.float32 and "scale" not in n else t for n, t in tensors.items()}
    return _write(folder, tensors, exact, json.loads((made / "config.json").read_text()), quantization)


def _write(
    folder: Path,
    tensors: dict[str, Tensor],
    exact: dict[str, Tensor],
    config: dict[str, Any],
    quantization: dict[str, Any] | None,
) -> Path:
    for place, state in ((folder, tensors), (folder / "exact", exact)):
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        safetensors.torch.save_file(contiguous, place / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "exact" / "generation_config.json", folder)
    return folder
