"""Quantised checkpoints of a trained model, on disk as their makers write them: logprobs beside transformers'.

Transformers runs the dequantised weights, and rounds activations where the checkpoint says so. The checkpoints of a
format family differ from layer to layer, so that one engine runs several schemes.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

from tests.support import judges, modelopt, models, quantized, quark, truth
from tests.support.adapters import adapter, merged
from tests.support.engine_run import EngineRun, run_engine, run_scenarios
from tests.support.quantized import Rounding

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPTS = quantized.prompts(4) + quantized.unsure_prompts(12)
SAMPLING = {"temperature": 0.0, "max_tokens": 12, "logprobs": 1}
ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [1, 16],
}


def integers(bits: int, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **more}


def packed(*arguments: Any, **more: Any) -> dict[str, Any]:
    return {"weights": integers(*arguments, **more), "format": "pack-quantized"}


def eight_bits(weights: str, inputs: str, symmetric: bool) -> dict[str, Any]:
    activations = integers(8, inputs, symmetric, dynamic=inputs == "token")
    return {"weights": integers(8, weights), "input_activations": activations, "format": "int-quantized"}


def floats(weights: str, inputs: str | None, **more: Any) -> dict[str, Any]:
    base = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = {"weights": {**base, "strategy": weights, **more}, "format": "float-quantized"}
    if inputs is not None:
        size = {"group_size": 128} if inputs == "group" else {}
        scheme["input_activations"] = {**base, "strategy": inputs, "dynamic": inputs != "tensor", **size}
    return scheme


MXFP4 = {
    "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
    "format": "mxfp4-pack-quantized",
}
MXFP8 = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "format": "mxfp8-quantized",
}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
NVFP4 = {"weights": _NVFP4 | {"scale_dtype": "torch.float8_e4m3fn"}, "format": "nvfp4-pack-quantized"}
NVFP4_BOTH = NVFP4 | {"input_activations": _NVFP4 | {"dynamic": "local"}}
W4A8 = {
    "weights": integers(4, "group", group_size=64),
    "input_activations": integers(8, "token", dynamic=True),
    "format": "int-quantized",
}
MODELOPT = ("fp8", "nvfp4", "mxfp8")
SCHEMES: dict[str, dict[str, Any]] = {
    # fused layers have one scheme: three layers of four
    r".*\.0\.self_attn\.[qkv]_proj": packed(4, "group", group_size=32),
    r".*\.0\.self_attn\.o_proj": MXFP4,
    r".*\.0\.mlp\.(gate|up)_proj": packed(4, "group", False, group_size=128),
    r".*\.0\.mlp\.down_proj": packed(8, "group", group_size=64),
    r".*\.1\.self_attn\.[qkv]_proj": eight_bits("channel", "token", True),
    r".*\.1\.self_attn\.o_proj": eight_bits("channel", "token", False),
    r".*\.1\.mlp\.(gate|up)_proj": eight_bits("tensor", "tensor", True),
    r".*\.1\.mlp\.down_proj": eight_bits("channel", "tensor", False),
    r".*\.2\.self_attn\.[qkv]_proj": floats("channel", "token"),
    r".*\.2\.self_attn\.o_proj": floats("tensor", "tensor"),
    r".*\.2\.mlp\.(gate|up)_proj": floats("block", "group", block_structure=[128, 128]),
    r".*\.2\.mlp\.down_proj": floats("channel", None),
    "lm_head": packed(4, "channel"),
}
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "awq": lambda folder: quantized.awq(folder, Rounding(group=64, symmetric=False)),
    "gptq": lambda folder: quantized.gptq(folder, Rounding(group=128), head=True),
    "gptq-order": lambda folder: quantized.gptq(folder, Rounding(group=32, symmetric=False, order=True)),
    "gptq-rules": lambda folder: quantized.gptq_by_rules(
        folder,
        Rounding(bits=8, group=-1, order=True),
        {
            r".*\.0\.self_attn\.[qkv]_proj": Rounding(group=32, symmetric=False, order=True),
            r".*\.0\.mlp\.down_proj": Rounding(group=1024),  # of 512 inputs
            r".*\.1\.self_attn\.v_proj": Rounding(bits=8, group=-1, symmetric=False),
            r".*\.1\.mlp\.(gate|up)_proj": None,
        },
    ),
    "compressed": lambda folder: quantized.compressed(folder, SCHEMES),
    "compressed-small": lambda folder: quantized.compressed(
        folder,
        {
            r".*\.0\..*_proj": MXFP8,
            r".*\.1\.self_attn\..*_proj": NVFP4,
            r".*\.1\.mlp\..*_proj": NVFP4_BOTH,
            r".*\.2\..*_proj": W4A8,
        },
    ),
    "fp8-blocks": quantized.fp8_blocks,
    **{f"modelopt-{name}": functools.partial(modelopt.checkpoint, algorithm=name.upper()) for name in MODELOPT},
    "modelopt-mixed": lambda folder: modelopt.mixed(
        folder, {r".*\.0\..*_proj": "FP8", r".*\.1\..*_proj": "NVFP4", r".*\.2\.mlp\..*_proj": "MXFP8"}
    ),
    "auto-round": lambda folder: quantized.auto_round(
        folder,
        Rounding(group=64),
        {r".*\.0\.self_attn\.[qkv]_proj": Rounding(bits=8, group=32), r".*\.1\.mlp\.down_proj": None},
    ),
    "quark": lambda folder: quark.checkpoint(
        folder,
        {
            r".*\.0\..*_proj": "fp8",
            r".*\.1\.self_attn\..*_proj": "int8",
            r".*\.1\.mlp\..*_proj": "int4",
            r".*\.2\.mlp\..*_proj": "mxfp4",
        },
    ),
    "fp8-online": lambda folder: quantized.online(folder, *ONLINE),
    "int8-online": quantized.online_int8,
}
ONLINE = {
    r".*\.0\..*_proj": "fp8_per_tensor",
    r".*\.1\..*_proj": "fp8_per_channel",
    r".*\.2\..*_proj": "fp8_per_block",
}
MORE: dict[str, dict[str, Any]] = {
    "int8-online": {"quantization": "npu_int8"},
    "fp8-online": {
        "quantization": "online",
        "quantization_config": {"targets": {f"re:{layers}": name for layers, name in ONLINE.items()}},
    },
}


# What the linear layers and the head run, whatever the instruction set.
INTEGERS = "npu_ops::weight_only_linear ({} in {})".format
FP8 = "npu_ops::fp8_linear ({})".format
BY_TENSOR = ("512 x 256", "256 x 256", "1024 x 256", "256 x 512")
RUNS = {
    "awq": {INTEGERS("uint4", "groups of 64")},
    "gptq": {INTEGERS("uint4b8", "groups of 128")},
    "gptq-order": {INTEGERS("uint4", "groups of 32")},
    "gptq-rules": {
        INTEGERS("uint4", "groups of 32"),
        INTEGERS("uint4b8", "channels"),
        INTEGERS("uint8", "channels"),
        INTEGERS("uint8b128", "channels"),
    },
    "compressed": {
        INTEGERS("uint4", "groups of 128"),
        INTEGERS("uint4b8", "groups of 32"),
        INTEGERS("uint4b8", "channels"),
        INTEGERS("uint8b128", "groups of 64"),
        "npu_ops::weight_only_linear (mxfp4)",
        "npu_ops::int8_linear (dynamic activations)",
        "npu_ops::int8_linear (static activations)",
        FP8("blocks of 1 x 256, rounded activations"),
        FP8("blocks of 1 x 512, whole activations"),
        FP8("blocks of 128 x 128, rounded activations"),
        FP8("blocks of 256 x 256, rounded activations"),
    },
    "compressed-small": {
        "npu_ops::weight_only_linear (mxfp8)",
        "npu_ops::weight_only_linear (nvfp4)",
        INTEGERS("int4", "groups of 64"),
    },
    "fp8-blocks": {FP8("blocks of 128 x 128, rounded activations")},
    # by tensor, one scale each for qkv, the output, the gates and ups, and the downs
    "modelopt-fp8": {FP8(f"blocks of {shape}, rounded activations") for shape in BY_TENSOR},
    "modelopt-nvfp4": {"npu_ops::weight_only_linear (nvfp4)"},
    "modelopt-mxfp8": {"npu_ops::weight_only_linear (mxfp8)"},
    "modelopt-mixed": {
        *(FP8(f"blocks of {shape}, rounded activations") for shape in BY_TENSOR),
        "npu_ops::weight_only_linear (nvfp4)",
        "npu_ops::weight_only_linear (mxfp8)",
    },
    "quark": {
        *(FP8(f"blocks of {shape}, rounded activations") for shape in BY_TENSOR),
        "npu_ops::int8_linear (dynamic activations)",
        INTEGERS("uint4b8", "groups of 32"),
        "npu_ops::weight_only_linear (mxfp4)",
    },
    "auto-round": {INTEGERS("uint4b8", "groups of 64"), INTEGERS("uint8b128", "groups of 32")},
    "fp8-online": {
        *(FP8(f"blocks of {shape}, rounded activations") for shape in BY_TENSOR),
        *(FP8(f"blocks of 1 x {columns}, rounded activations") for columns in (256, 512)),
        FP8("blocks of 128 x 128, rounded activations"),
    },
    "int8-online": {"npu_ops::weight_only_linear (int8 by channel)"},
}
DTYPES = ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    return {name: make(folder / name) for name, make in CHECKPOINTS.items()}


@pytest.fixture(scope="module", params=DTYPES)
def runs(
    checkpoints: dict[str, Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.dtype, dict[str, EngineRun]]:
    """A prompt alone and several together."""
    rounds = [{"prompts": prompts, "sampling": SAMPLING} for prompts in (PROMPTS[:1], PROMPTS)]
    scenarios = [
        {"engine": ENGINE | MORE.get(name, {}) | {"model": str(folder), "dtype": request.param}, "rounds": rounds}
        for name, folder in checkpoints.items()
    ]
    done = run_scenarios(tmp_path_factory.mktemp("runs"), scenarios)
    return getattr(torch, request.param), dict(zip(checkpoints, done, strict=True))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name: str, checkpoints: dict[str, Path], runs: tuple[torch.dtype, dict[str, EngineRun]]) -> None:
    """As near to the exact weights in float32 as transformers is in the engine's dtype."""
    dtype, run = runs[0], runs[1][name]
    assert run.platform == "npu"
    assert run.graphs_captured
    assert run.tokens(0) == run.tokens(1)[:1]
    ran = {how.rpartition(", ")[0] for layer in ("ParallelLinear", "LMHead") for how in run.implementations(layer)}
    assert ran - {"npu_ops::linear", "npu_ops::linear, npu_ops::embedding"} == RUNS[name]
    assert_near(checkpoints[name], dtype, run.rounds[1])


def test_a_tied_head_of_8_bits(tmp_path: Path) -> None:
    """The demo model's logits come from codes, and its embedding stays: the same answers by nearly the same logprobs."""
    rounds = [{"prompts": quantized.prompts(4), "sampling": SAMPLING}]
    settings = ENGINE | {"dtype": "float32"}
    whole, rounded = (
        run_engine(tmp_path / bits, quantized.DEMO, rounds, {"NPU_HEAD_BITS": bits}, **settings) for bits in ("16", "8")
    )
    assert {how.partition(", ")[0] for how in rounded.implementations("VocabParallelEmbedding")} == {
        "npu_ops::weight_only_linear (int8 by channel)"
    }
    assert rounded.tokens(0) == whole.tokens(0)
    differences = [
        abs(one - other)
        for answer, expected in zip(rounded.rounds[0], whole.rounds[0], strict=True)
        for one, other in zip(answer["logprobs"], expected["logprobs"], strict=True)
    ]
    assert 0 < max(differences) < 0.1


@pytest.mark.nightly
def test_a_layer_that_is_left_out_of_what_is_made_online(tmp_path: Path) -> None:
    left_out = r".*\.2\.self_attn\.o_proj"
    others, none = rf"(?!{left_out}){quantized.ALL}", "none"
    folder = quantized.online(tmp_path / "model", none, others, none, layers=others)
    chosen = {
        "quantization": "online",
        "quantization_config": {"linear": "fp8_per_channel", "ignore": [f"re:{left_out}"]},
    }
    rounds = [{"prompts": PROMPTS, "sampling": SAMPLING}]
    run = run_engine(tmp_path / "run", folder, rounds, dtype="bfloat16", **ENGINE, **chosen)
    layers = run.implementations("ParallelLinear")
    assert any(how.startswith("npu_ops::linear,") or how == "npu_ops::linear" for how in layers), layers
    assert_near(folder, torch.bfloat16, run.rounds[0])


@pytest.mark.nightly
def test_rotated_inputs(tmp_path: Path) -> None:
    """compressed-tensors' `transform_config`: the weights were rotated before they were rounded, the inputs are here."""
    model = models.tiny_llama(tmp_path / "whole", num_hidden_layers=2, intermediate_size=512)
    rotation = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5] * 9)
    rotate(model, rotation)
    folder = quantized.compressed(tmp_path / "rotated", {r".*_proj$": packed(4, "group", group_size=32)}, model)
    rotate(folder / "exact", rotation)
    config = json.loads((folder / "config.json").read_text())
    places = [{"targets": ["re:.*down_proj$"], "location": "input"}]
    places += [{"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True}]
    config["quantization_config"]["transform_config"] = {"config_groups": {"R4": {"type": "hadamard", "apply": places}}}
    (folder / "config.json").write_text(json.dumps(config))
    rounds = [{"prompts": models.prompt_token_ids([90, 1, 7, 17]), "sampling": SAMPLING}]
    run = run_engine(tmp_path, folder, rounds, **ENGINE | {"dtype": "float32"})
    exact = judges.of_model(quantized.exact_model(folder))
    errors = truth.of_logprobs(exact, exact, judges.requests(rounds[0]), run.rounds[0])
    assert errors.ours.abs().max() < 1e-4


def rotate(folder: Path, rotation: torch.Tensor) -> None:
    """Rotate what goes into the second projections of MLPs, in the weights of a model."""
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights |= {name: (w @ rotation).contiguous() for name, w in weights.items() if name.endswith("down_proj.weight")}
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


def test_an_adapter_on_weights_of_4_bits_beside_activations_of_8(tmp_path: Path) -> None:
    folder = quantized.compressed(tmp_path / "model", {r".*_proj": W4A8})
    one = adapter(tmp_path / "one", quantized.exact_model(folder), ["q_proj", "o_proj", "down_proj"], 4, seed=1)
    rounds = [{"prompts": PROMPTS, "sampling": SAMPLING, "lora": [str(one)] * len(PROMPTS)}]
    run = run_engine(tmp_path / "run", folder, rounds, dtype="bfloat16", **ENGINE, enable_lora=True)
    assert_near(folder, torch.bfloat16, run.rounds[0], one)


def assert_near(folder: Path, dtype: torch.dtype, outputs: list[dict[str, Any]], lora: Path | None = None) -> None:
    """Assert that the engine is as near to the exact weights in float32 as transformers is in the engine's dtype."""
    models = [quantized.exact_model(folder, kind) for kind in (torch.float32, dtype)]
    exact, rounded = (judges.of_model(model if lora is None else merged(model, lora)) for model in models)
    errors = truth.of_logprobs(exact, rounded, [{"prompts": prompt} for prompt in PROMPTS], outputs)
    assert errors.theirs.square().mean() > (torch.finfo(dtype).eps / 4) ** 2  # noise that can be measured
    errors.assert_within(1.5)
