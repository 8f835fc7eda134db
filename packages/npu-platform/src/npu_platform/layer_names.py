"""What vLLM calls layers that a quantised checkpoint has under other names, and asks the checkpoint's lists for.

Those lists, and maps, say which layers are quantised, or are not, or how. vLLM's own map of weights' names does not
reach all of them: of Jamba's, Falcon-H1's and Zamba 2's layers some are numbered after the others there, or have no
number, so that on any device quantised layers were taken for whole ones, and the other way round.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

__all__ = ["find_listed_layers"]

_LISTS = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore", "modules_in_block_to_quantize")
"""Fields of vLLM's configurations of quantisation."""
_MAPS = ("extra_config", "quantized_layers")
"""Likewise: what is said of each layer, by its name (AutoRound's, ModelOpt's mixed precision)."""
_OF_QUARK = ("exclude", "layer_quant_config")
"""A list and a map in what vLLM keeps whole of Quark's configuration."""

_DRAFTER = "draft_model."


def find_listed_layers(vllm_config: VllmConfig) -> None:
    """Add to a checkpoint's lists and maps the names by which vLLM asks for the layers that they name."""
    config, translations = vllm_config.quant_config, _translations(vllm_config)
    if _drafts(vllm_config):
        translations = [*translations, *(_of_drafter(translate) for translate in translations)]
    for field in (*_LISTS, *_MAPS):
        if (names := getattr(config, field, None)) is not None:
            setattr(config, field, _with_asked_for(names, translations))
    whole: Any = getattr(config, "quant_config", None)
    for field in _OF_QUARK if isinstance(whole, dict) else ():
        whole[field] = _with_asked_for(whole.get(field), translations)


def _with_asked_for(names: Any, translations: list[Callable[[str], str]]) -> Any:
    """Return a list, or a map, with the other names of what it names; anything else as it is."""
    if not isinstance(names, (list, dict)) or not all(isinstance(name, str) for name in names):
        return names
    asked_for = {new: name for name in names for translate in translations if (new := translate(name)) != name}
    if isinstance(names, list):
        return [*dict.fromkeys([*names, *asked_for])]
    return {new: names[name] for new, name in asked_for.items()} | names


def _translations(vllm_config: VllmConfig) -> list[Callable[[str], str]]:
    """Return what makes vLLM's name of a checkpoint's; more than one where it asks for parts under several."""
    model = vllm_config.model_config
    architecture = "" if model is None else model.architecture
    if architecture.startswith("Jamba"):
        return [lambda name: _without_attention(_mixer(name))]
    if architecture == "FalconH1ForCausalLM":
        after = int(model.hf_config.num_hidden_layers)
        return [lambda name: _without_attention(_numbered(name, r"^(model)\.layers\.(\d+)\.mamba\b", r"\1.", after))]
    if architecture == "Zamba2ForCausalLM":
        return _of_zamba(list(model.hf_config.layers_block_type).count("hybrid"))
    return [_mixer]


def _drafts(vllm_config: VllmConfig) -> bool:
    """Say whether the model is one that drafts for another, of which vLLM gives all layers a name of their own."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and speculative.draft_model_config is vllm_config.model_config


def _of_drafter(translate: Callable[[str], str]) -> Callable[[str], str]:
    return lambda name: name if name.startswith(_DRAFTER) else _DRAFTER + translate(name)


def _of_zamba(hybrid: int) -> list[Callable[[str], str]]:
    """Layers of Zamba 2 have a number alone, after those of the hybrid ones; what these share has none."""

    def own(name: str) -> str:
        name = _numbered(name, r"^model\.()layers\.(\d+)\.(?:mamba_decoder\.)?mamba\b", "", hybrid)
        return re.sub(
            r"^model\.layers\.(\d+)\.linear$", lambda found: f"{int(found[1]) + hybrid}.linear", _shared(name)
        )

    return [own, lambda name: re.sub(r"\.[qkv]_proj$", ".qkv_proj", own(name))]


def _shared(name: str) -> str:
    found = re.sub(r"^model\.layers\.\d+\.shared_transformer\.(?:self_attn\.)?", "model.", name)
    found = re.sub(r"\.(linear_[qkv]_adapter)_list\.\d+", r".\1", found)
    return re.sub(r"(adapter(?:_list\.\d+)?)\.([01])$", lambda part: f"{part[1]}.{'AB'[int(part[2])]}", found)


def _mixer(name: str) -> str:
    return re.sub(r"\.mamba\b", ".mixer", name)


def _without_attention(name: str) -> str:
    return re.sub(r"(\.layers\.\d+)\.self_attn\.", r"\1.", name)


def _numbered(name: str, pattern: str, before: str, first: int) -> str:
    """Return the name of a state-space layer that has a number after `first` others."""
    found: Any = re.match(pattern, name)
    return f"{found.expand(before)}{int(found[2]) + first}.mixer{name[found.end() :]}" if found else name
