"""Makes quantised checkpoints of a trained model in their on-disk formats, and what they mean exactly.

Each maker rounds the demo model's linear layers to nearest, writes the checkpoint into a folder and, beside it in
`exact`, the same model with the dequantised weights in float32. compressed-tensors' own library packs and unpacks its
formats; AWQ's and GPTQ's are written here from their description.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = [
    "ALL",
    "BITSANDBYTES",
    "DEMO",
    "NVFP4_RANGE",
    "WIDEST",
    "Rounded",
    "RoundedExperts",
    "Rounding",
    "auto_round",
    "auto_round_config",
    "auto_round_says",
    "auto_round_tensors",
    "awq",
    "awq_tensors",
    "bitsandbytes",
    "by_rank",
    "compressed",
    "decompressed",
    "exact_model",
    "fp8_blocks",
    "gptq",
    "gptq_tensors",
    "keeps_activations",
    "kept",
    "mxfp4",
    "online",
    "online_int8",
    "prompts",
    "rounding_of",
    "save",
    "unsure_prompts",
    "weight_qparams",
]

DEMO = Path(str(files("npu_platform.demo") / "model"))
WIDEST = 2.0  # no weight of the model is larger
NVFP4_RANGE = 448.0 * 6.0  # the largest scale times the largest value
# Formats whose activations npu leaves as they are, whatever the checkpoint says.
_WHOLE_ACTIVATIONS = ("mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized")
_NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
_NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
BITSANDBYTES = ("NF4", "int8")
LINEAR = re.compile(r"\.(self_attn|(mlp|feed_forward)(\.experts\.\d+)?)\.\w+_proj\.weight$")
ALL = r".*_proj$"  # of these layers


def prompts(count: int) -> list[list[int]]:
    """Return questions that the demo model was trained to answer, as tokens."""
    from npu_platform.demo.facts import all_facts
    from npu_platform.demo.train import ASSISTANT, END, USER

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    facts = all_facts()
    chosen = facts[:: max(1, len(facts) // count)][:count]
    return [tokenizer.encode(f"{USER}{fact.question}{END}{ASSISTANT}") for fact in chosen]


def unsure_prompts(count: int) -> list[list[int]]:
    """Return tokens in no order, which the demo model knows no answer to: its logprobs show what rounding does.

    Behind a question it is so sure that logprobs are about 1e-5, and their errors those of one or two tokens.
    """
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(3, 890, (8 + 5 * i,), generator=generator).tolist() for i in range(count)]


@dataclass(frozen=True)
class Rounding:
    """Rounds a weight [N, K] to integers of `bits`, in groups along K (-1, or more than K: all of K)."""

    bits: int = 4
    group: int = 32
    symmetric: bool = True
    order: bool = False  # groups of inputs that are not neighbours, as GPTQ's activation order makes them

    def __call__(self, weight: Tensor) -> Rounded:
        """Round to nearest."""
        n, k = weight.shape
        group = k if self.group == -1 else min(self.group, k)
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if self.order else torch.arange(k)
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[order] = (torch.arange(k) // group).int()
        parts = weight.float()[:, order].view(n, -1, group)
        top, middle = 2**self.bits - 1, 2 ** (self.bits - 1)
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        span = torch.maximum(-low, high) * 2 if self.symmetric else high - low
        scale = (span / top).clamp(min=1e-6).bfloat16()
        zero = (
            torch.full_like(scale, middle).int()
            if self.symmetric
            else (-low / scale.float()).round().clamp(1, top).int()
        )
        q = (weight.float() / scale.float()[:, g_idx]).round().int() + zero[:, g_idx]
        q = q.clamp(0, top)
        return Rounded(q, scale, zero, g_idx, (q - zero[:, g_idx]).float() * scale.float()[:, g_idx])


@dataclass(frozen=True)
class Rounded:
    """Integers [N, K], scales and zero points [N, groups], the group of each input [K], and what they stand for."""

    q: Tensor
    scale: Tensor
    zero: Tensor
    g_idx: Tensor
    exact: Tensor


def awq(folder: Path, rounding: Rounding, model: Path = DEMO, layers: str = ALL) -> Path:
    """AWQ: nibbles along the outputs, interleaved."""
    config = {"quant_method": "awq", "bits": 4, "group_size": rounding.group, "zero_point": True, "version": "gemm"}
    return save(folder, lambda name, weight: awq_tensors(name, rounding(weight)), config, model=model, layers=layers)


def awq_tensors(name: str, r: Rounded) -> tuple[dict[str, Tensor], Tensor]:
    """One layer as AWQ stores it, and what it means."""
    pack = lambda values: _int32(values.t()[:, _awq_order(values.shape[0])], 4)  # noqa: E731
    return {f"{name}.qweight": pack(r.q), f"{name}.qzeros": pack(r.zero), f"{name}.scales": r.scale.t()}, r.exact


def gptq(folder: Path, rounding: Rounding, model: Path = DEMO, layers: str = ALL, *, head: bool = False) -> Path:
    """GPTQ: values along the inputs, zero points along the outputs and less one. `head`: lm_head too."""
    write = lambda name, weight: gptq_tensors(name, rounding(weight), rounding.bits)  # noqa: E731
    config = gptq_config(rounding) | {"lm_head": head}
    return save(folder, write, config, head=head, model=model, layers=layers)


def gptq_by_rules(folder: Path, rounding: Rounding, rules: dict[str, Rounding | None]) -> Path:
    """GPTQ with `dynamic`: modules that are rounded otherwise, or not (None), by a pattern; one order for all."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        chosen = next((rule for pattern, rule in rules.items() if re.match(pattern, name)), rounding)
        if chosen is None:
            return {f"{name}.weight": weight}, weight
        return gptq_tensors(name, chosen(weight), chosen.bits)

    return save(folder, write, gptq_config(rounding) | {"dynamic": gptq_rules(rules)})


def gptq_config(rounding: Rounding) -> dict[str, Any]:
    """What a checkpoint of GPTQ says of itself."""
    config = {"quant_method": "gptq", "bits": rounding.bits, "group_size": rounding.group, "checkpoint_format": "gptq"}
    return config | {"desc_act": rounding.order, "sym": rounding.symmetric, "lm_head": False}


def gptq_rules(rules: dict[str, Rounding | None]) -> dict[str, dict[str, Any]]:
    """GPTQModel's `dynamic`: `-:` before modules that were left as they are."""
    left: dict[str, dict[str, Any]] = {f"-:{pattern}": {} for pattern, rule in rules.items() if rule is None}
    return left | {
        pattern: {"bits": rule.bits, "group_size": rule.group, "sym": rule.symmetric}
        for pattern, rule in rules.items()
        if rule is not None
    }


def gptq_tensors(name: str, r: Rounded, bits: int = 4) -> tuple[dict[str, Tensor], Tensor]:
    """One layer as GPTQ stores it, and what it means."""
    tensors = {
        "qweight": _int32(r.q, bits).t(),
        "qzeros": _int32((r.zero - 1).t(), bits),
        "scales": r.scale.t(),
        "g_idx": r.g_idx,
    }
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, r.exact


def auto_round(
    folder: Path, rounding: Rounding, others: dict[str, Rounding | None], model: Path = DEMO, layers: str = ALL
) -> Path:
    """AutoRound's own, in the layout of GPTQ; `others`: layers that are rounded otherwise, or not, by a pattern."""
    extra = {name: auto_round_says(None) for name in kept(model, layers)}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        chosen = next((other for pattern, other in others.items() if re.match(pattern, name)), rounding)
        if chosen is not rounding:
            extra[name] = auto_round_says(chosen)
        return auto_round_tensors(name, weight, chosen)

    return save(folder, write, auto_round_config(rounding, extra), model=model, layers=layers)


def auto_round_config(rounding: Rounding, extra: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json says: how layers are rounded, but for those of `extra`."""
    layout = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}
    return layout | auto_round_says(rounding) | {"extra_config": extra}


def auto_round_says(rounding: Rounding | None) -> dict[str, Any]:
    """What extra_config says of a layer."""
    if rounding is None:
        return {"bits": 16, "data_type": "float"}
    return {"bits": rounding.bits, "group_size": rounding.group, "sym": rounding.symmetric}


def auto_round_tensors(name: str, weight: Tensor, rounding: Rounding | None) -> tuple[dict[str, Tensor], Tensor]:
    """One layer as AutoRound stores it in the layout of GPTQ, which has no order, and what it means."""
    if rounding is None:
        return {f"{name}.weight": weight}, weight
    stored, exact = gptq_tensors(name, rounding(weight), rounding.bits)
    return {key: tensor for key, tensor in stored.items() if not key.endswith(".g_idx")}, exact


def compressed(
    folder: Path, schemes: dict[str, dict[str, Any]], model: Path = DEMO, *, names_the_others: bool = False
) -> Path:
    """compressed-tensors: a scheme (weights, input_activations, format) for the layers that match each pattern.

    Of another model than the demo one, layers that match no pattern stay as they are. The checkpoint has the pattern, or
    with `names_the_others` says that all linear layers are quantised but for those that it names, as llm-compressor does.
    """
    head = "lm_head" in schemes
    made = {pattern: QuantizationScheme(targets=[f"re:{pattern}"], **scheme) for pattern, scheme in schemes.items()}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scheme = next((scheme for pattern, scheme in made.items() if re.match(pattern, name)), None)
        if scheme is None:
            assert model != DEMO, name
            return {f"{name}.weight": weight}, weight
        weights, inputs = scheme.weights, scheme.input_activations
        if scheme.format == "mxfp4-pack-quantized":
            codes, scales, exact = mxfp4(weight.float())
            return {f"{name}.weight_packed": codes, f"{name}.weight_scale": scales}, exact
        scale, zero = weight_qparams(weight.float(), weights)
        state = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero}
        if weights.strategy == "tensor_group":
            state["weight_global_scale"] = NVFP4_RANGE / torch.tensor([WIDEST])
            if inputs is not None:
                state["input_global_scale"] = NVFP4_RANGE / torch.tensor([8.0])
        if inputs is not None and inputs.dynamic is False:  # a range that holds what these layers see
            low, high = torch.tensor([-6.0]), torch.tensor([6.0 if inputs.symmetric else 8.0])
            state["input_scale"], input_zero = calculate_qparams(low, high, inputs)
            if not inputs.symmetric:
                state["input_zero_point"] = input_zero
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        state = compressor.compress(state, scheme)
        return {f"{name}.{key}": tensor for key, tensor in state.items()}, decompressed(state, scheme)

    groups = {
        f"group_{i}": json.loads(scheme.model_dump_json(exclude_none=True)) for i, scheme in enumerate(made.values())
    }
    config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "ignore": [] if head else ["lm_head"],
    }
    if names_the_others:
        ((pattern, _),) = made.items()
        config["ignore"] += kept(model, pattern)
        groups["group_0"]["targets"] = ["Linear"]
    formats = {scheme.format for scheme in made.values()}
    config["format"] = formats.pop() if len(formats) == 1 else "mixed-precision"
    inputs = {
        pattern: json.loads(scheme.input_activations.model_dump_json())
        for pattern, scheme in made.items()
        if scheme.input_activations is not None and not keeps_activations(scheme)
    }
    return save(folder, write, {**config, "config_groups": groups}, inputs, head=head, model=model)


def decompressed(state: Mapping[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    """Return what a layer's parts in a format of compressed-tensors mean, in float32.

    Its own compressor rounds what NVFP4 means to bfloat16: eight times as coarse as float16, whose noise is measured.
    """
    if scheme.format == "nvfp4-pack-quantized":
        codes, whole = state["weight_packed"], state["weight_global_scale"].float()
        values = unpack_fp4_from_uint8(codes, len(codes), 2 * codes.shape[1], torch.float32)
        scales = state["weight_scale"].float() / whole
        return values * scales.repeat_interleave(scheme.weights.group_size, 1)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    weight: Tensor = compressor.decompress(dict(state), scheme)["weight"]
    return weight.float()


def keeps_activations(scheme: QuantizationScheme) -> bool:
    """Return whether npu leaves a layer's inputs as they are, whatever the checkpoint says."""
    return scheme.format in _WHOLE_ACTIVATIONS or scheme.weights.num_bits == 4


def fp8_blocks(folder: Path, model: Path = DEMO, layers: str = ALL) -> Path:
    """The fp8 format of DeepSeek's checkpoints: e4m3 with a scale for each block of 128 x 128."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.float().unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        q = (weight.float() / wide).to(torch.float8_e4m3fn)
        return {f"{name}.weight": q, f"{name}.weight_scale_inv": scale}, q.float() * wide

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    inputs = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 128,
        "dynamic": True,
        "symmetric": True,
    }
    config |= {"modules_to_not_convert": [*kept(model, layers), "lm_head"]}
    return save(folder, write, config, {layers: inputs}, model=model, layers=layers)


def online(folder: Path, by_tensor: str, by_channel: str, by_block: str, model: Path = DEMO, layers: str = ALL) -> Path:
    """The model unquantised, and what vLLM makes of it when it loads layers of these patterns in fp8."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        w = weight.float()
        if re.match(by_block, name):
            blocks = w.unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
            scale = (blocks.abs().amax((1, 3)) / 448).repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            scale = w.abs().amax(1, keepdim=True) / 448 if re.match(by_channel, name) else w.abs().max() / 448
        return {f"{name}.weight": weight}, (w / scale).to(torch.float8_e4m3fn).float() * scale

    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "symmetric": True}
    token, group = inputs | {"strategy": "token"}, inputs | {"strategy": "group", "group_size": 128}
    inputs = {by_tensor: token, by_channel: token, by_block: group}
    return save(folder, write, None, inputs, model=model, layers=layers)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round [..., K] to blocks of 32: codes two an octet, e8m0 scales, and what they mean."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    parts = weight.unflatten(-1, (-1, 32))
    exponent = (parts.abs().amax(-1, keepdim=True) / 6).clamp(min=2**-100).log2().ceil()
    scaled = parts / torch.exp2(exponent)
    code = (scaled.abs()[..., None] - values).abs().argmin(-1)
    exact = values[code] * scaled.sign() * torch.exp2(exponent)
    code = (code + 8 * (scaled < 0)).to(torch.uint8).flatten(-2)
    return code[..., ::2] | code[..., 1::2] << 4, (exponent.squeeze(-1) + 127).to(torch.uint8), exact.flatten(-2)


def bitsandbytes(folder: Path, form: str, model: Path = DEMO) -> Path:
    """bitsandbytes: NF4 in blocks of 64 along the rows, two values an octet, or int8 with a scale for each row."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if form == "int8":
            scale = weight.float().abs().amax(1)
            q = (weight.float() * (127 / scale)[:, None]).round().to(torch.int8)
            stored = {"weight": q, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            return {f"{name}.{key}": tensor for key, tensor in stored.items()}, q.float() * scale[:, None] / 127
        blocks = weight.float().view(-1, 64)
        scale = blocks.abs().amax(1)
        table = torch.tensor(_NF4)
        codes = (blocks[..., None] / scale[:, None, None] - table).abs().argmin(-1)
        pairs = codes.view(-1, 2)
        said = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        stored = {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
            "weight.absmax": scale,
            "weight.quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8),
        }
        return {f"{name}.{key}": tensor for key, tensor in stored.items()}, (table[codes] * scale[:, None]).view_as(
            weight
        )

    config = {"quant_method": "bitsandbytes", f"load_in_{4 if form == 'NF4' else 8}bit": True}
    return save(folder, write, config, model=model)


def online_int8(folder: Path) -> Path:
    """The model unquantised, and what `npu_int8` makes of it."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return {f"{name}.weight": weight}, (weight.float() / scale).round() * scale

    return save(folder, write, None)


def exact_model(folder: Path, dtype: torch.dtype = torch.float32, ranks: int = 1) -> torch.nn.Module:
    """Return transformers' model with the dequantised weights; inputs are rounded where the checkpoint says so.

    Of layers that tensor-parallel ranks share along the inputs each rounds its own part.
    """
    seeing = "vision_config" in json.loads((folder / "exact" / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder / "exact", dtype=dtype, attn_implementation="eager")
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    for target, inputs in json.loads((folder / "exact" / "inputs.json").read_text()).items():
        args = QuantizationArgs(**inputs)
        for name, module in [*model.named_modules()]:
            if not re.match(target, name):
                continue
            place = re.escape(name[max(0, name.find("layers.")) :])  # what goes before has other names with images
            place = re.sub(r"(?<=layers\\\.)\d+(?=\\\.shared_)", r"\\d+", place)  # stored once
            scales = [value for key, value in stored.items() if re.search(rf"{place}(\..*)?\.input_scale$", key)]
            scale = torch.stack(scales).max() if scales else None  # of experts the largest
            rounds = rounding_of(args, scale, stored.get(f"{name}.input_zero_point"))
            if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Parameter):
                model.set_submodule(name, RoundedExperts(module, rounds, ranks))
            elif isinstance(module, torch.nn.Linear):
                parts = by_rank(rounds, ranks if name.endswith(("o_proj", "down_proj")) else 1)
                module.register_forward_pre_hook(lambda _, inputs, parts=parts: (parts(inputs[0]),))
    return model.eval()


class RoundedExperts(torch.nn.Module):
    """transformers' experts, which round what goes into each of their two projections, the second's by ranks."""

    def __init__(self, experts: torch.nn.Module, rounds: Callable[[Tensor], Tensor], ranks: int = 1) -> None:
        """Take the place of ``experts``."""
        super().__init__()
        self.experts, self.rounds, self.rounds_down = experts, rounds, by_rank(rounds, ranks)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums [tokens, hidden] of the chosen experts' outputs."""
        result, rounded = torch.zeros_like(hidden_states), self.rounds(hidden_states)
        for expert in top_k_index.unique():
            token, place = torch.where(top_k_index == expert)
            gate, up = (rounded[token] @ self.experts.gate_up_proj[expert].t()).chunk(2, -1)
            wide = self.rounds_down(self.experts.act_fn(gate) * up) @ self.experts.down_proj[expert].t()
            result.index_add_(0, token, (wide * top_k_weights[token, place, None]).to(result.dtype))
        return result


def by_rank(rounds: Callable[[Tensor], Tensor], ranks: int) -> Callable[[Tensor], Tensor]:
    """Return what rounds the part of each rank of [..., K] by itself."""
    return lambda values: torch.cat([rounds(part) for part in values.chunk(ranks, -1)], -1)


def rounding_of(
    args: QuantizationArgs, scale: Tensor | None = None, zero: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Return what rounds activations [..., K] as `args` say; scale and zero point of a range that is given."""

    def rounds(values: Tensor) -> Tensor:
        x = values.float()
        parts = x.unflatten(-1, (-1, args.group_size or x.shape[-1]))
        scale, zero = given
        if args.dynamic:
            scale, zero = calculate_qparams(parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True), args)
            if args.type == "int" and args.symmetric:  # by 127 in vLLM's kernels, by 127.5 there
                scale = parts.abs().amax(-1, keepdim=True) / 127
        zero = 0 if zero is None else zero.float()
        if args.type == "float":
            rounded = (parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        else:
            rounded = (((parts / scale).round() + zero).clamp(-128, 127) - zero) * scale
        return rounded.flatten(-2).to(values.dtype)

    given = scale, zero
    return rounds


def weight_qparams(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return scales and zero points for the ranges that the scheme asks for."""
    n, k = weight.shape
    if args.strategy in ("group", "tensor_group"):
        parts = weight.view(n, -1, args.group_size)
        low, high = parts.amin(-1), parts.amax(-1)
        if args.strategy == "tensor_group":
            return calculate_qparams(low, high, args, global_scale=NVFP4_RANGE / torch.tensor([WIDEST]))
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        parts = weight.view(n // rows, rows, k // columns, columns)
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    else:  # one range for all layers: vLLM would round the shards of a fused layer again, to the largest scale
        high = torch.tensor([WIDEST])
        low = -high
        assert weight.abs().max() <= WIDEST
    scale, zero = calculate_qparams(low, high, args)
    return scale.bfloat16().float() if args.num_bits == 4 else scale, zero


def save(
    folder: Path,
    write: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    quantization: dict[str, Any] | None,
    inputs: dict[str, Any] | None = None,
    *,
    head: bool = False,
    model: Path = DEMO,
    layers: str = ALL,
) -> Path:
    """Write both models; `inputs`: how activations are rounded, by a pattern of layers; `head`: round lm_head too."""
    (folder / "exact").mkdir(parents=True)
    tensors, exact = {}, {}
    weights = safetensors.torch.load_file(model / "model.safetensors")
    if head:  # the demo model's is tied to the embedding
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for name, weight in weights.items():
        chosen = LINEAR.search(name) and re.match(layers, name.removesuffix(".weight"))
        if chosen or (head and name == "lm_head.weight"):
            stored, exact[name] = write(name.removesuffix(".weight"), weight)
            tensors |= {key: tensor.contiguous() for key, tensor in stored.items()}
        else:
            tensors[name] = exact[name] = weight
    config = json.loads((model / "config.json").read_text())
    config |= {"tie_word_embeddings": not head} if model == DEMO else {}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(exact, folder / "exact" / "model.safetensors", metadata={"format": "pt"})
    (folder / "exact" / "config.json").write_text(json.dumps(config))
    (folder / "exact" / "inputs.json").write_text(json.dumps(inputs or {}))
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    for file in {*model.glob("*.json")} - {model / "config.json"}:  # of the tokenizer, the processor, generation
        shutil.copy(file, folder)
    return folder


def kept(model: Path, layers: str) -> list[str]:
    """Return the layers of a model whose weights stay as they are."""
    with safetensors.safe_open(model / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 it is no mapping
    names = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    return [name for name in names if not re.match(layers, name)]


def _int32(values: Tensor, bits: int) -> Tensor:
    """Pack along the last dimension, lowest bits first."""
    parts = values.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    words = (parts << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _awq_order(outputs: int) -> Tensor:
    return torch.arange(outputs).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
