"""Layers that a quantised checkpoint lists are found under the names by which vLLM asks for them."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest

from npu_platform.layer_names import find_listed_layers

FIELDS = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore", "modules_in_block_to_quantize")
NAMED = {
    "GraniteMoeHybridForCausalLM": {
        "model.layers.0.mamba.in_proj": ["model.layers.0.mixer.in_proj"],
        "model.layers.1.mamba*": ["model.layers.1.mixer*"],
    },
    "JambaForCausalLM": {
        "model.layers.0.mamba.x_proj": ["model.layers.0.mixer.x_proj"],
        "model.layers.1.self_attn.q_proj": ["model.layers.1.q_proj"],
    },
    "FalconH1ForCausalLM": {
        "model.layers.3.mamba.in_proj": ["model.7.mixer.in_proj"],
        "model.layers.3.self_attn.o_proj": ["model.layers.3.o_proj"],
    },
    "Zamba2ForCausalLM": {
        "model.layers.0.mamba.in_proj": ["2.mixer.in_proj"],
        "model.layers.1.mamba_decoder.mamba.out_proj": ["3.mixer.out_proj"],
        "model.layers.1.linear": ["3.linear"],
        "model.layers.1.shared_transformer.self_attn.q_proj": ["model.q_proj", "model.qkv_proj"],
        "model.layers.1.shared_transformer.self_attn.linear_q_adapter_list.0.0": ["model.linear_q_adapter.A"],
        "model.layers.1.shared_transformer.feed_forward.down_proj": ["model.feed_forward.down_proj"],
        "model.layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list.1.1": [
            "model.feed_forward.gate_up_proj_adapter_list.1.B"
        ],
    },
}


def config_of(architecture: str, **lists: object) -> SimpleNamespace:
    shape = SimpleNamespace(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2)
    model = SimpleNamespace(architecture=architecture, hf_config=shape)
    return SimpleNamespace(quant_config=SimpleNamespace(**lists), model_config=model)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("architecture", NAMED)
def test_names_are_added(architecture: str, field: str) -> None:
    names = [*NAMED[architecture], "lm_head"]
    config = config_of(architecture, **{field: names})
    for _ in range(2):  # each process asks the platform
        find_listed_layers(config)
    found = getattr(config.quant_config, field)
    assert found[: len(names)] == names
    assert sorted(found[len(names) :]) == sorted(chain.from_iterable(NAMED[architecture].values()))


@pytest.mark.parametrize("field", ["extra_config", "quantized_layers"])
@pytest.mark.parametrize("architecture", NAMED)
def test_what_is_said_of_layers_is_found(architecture: str, field: str) -> None:
    said = {name: {"bits": number} for number, name in enumerate(NAMED[architecture])}
    config = config_of(architecture, **{field: dict(said)})
    for _ in range(2):
        find_listed_layers(config)
    asked_for = {new: said[name] for name, others in NAMED[architecture].items() for new in others}
    assert getattr(config.quant_config, field) == said | asked_for


def test_quarks_names_are_found() -> None:
    said = {"exclude": ["model.layers.0.mamba.in_proj"], "layer_quant_config": {"*.mamba.out_proj": {"weight": None}}}
    config = config_of("GraniteMoeHybridForCausalLM", quant_config=said | {"global_quant_config": {}})
    find_listed_layers(config)
    assert config.quant_config.quant_config == {
        "exclude": ["model.layers.0.mamba.in_proj", "model.layers.0.mixer.in_proj"],
        "layer_quant_config": {"*.mamba.out_proj": {"weight": None}, "*.mixer.out_proj": {"weight": None}},
        "global_quant_config": {},
    }


def test_what_has_no_list_stays() -> None:
    config = config_of("JambaForCausalLM", ignore=None)
    find_listed_layers(config)
    assert config.quant_config.ignore is None
    find_listed_layers(SimpleNamespace(quant_config=None, model_config=None))


def test_a_model_that_drafts_has_names_of_its_own() -> None:
    config = config_of("LlamaForCausalLM", exclude_modules=["model.layers.0.mlp.up_proj"])
    config.speculative_config = SimpleNamespace(draft_model_config=config.model_config)
    for _ in range(2):
        find_listed_layers(config)
    both = ["model.layers.0.mlp.up_proj", "draft_model.model.layers.0.mlp.up_proj"]
    assert config.quant_config.exclude_modules == both
