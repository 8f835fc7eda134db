"""Makers of small random draft heads for speculation, and what each must draft: transformers' layers, without a cache.

A head reads a token beside what the target thought when it chose that token, and drafts the next one; for the draft after
it, it goes on from its own thought. The reference computes all positions anew for each draft.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.support import models
from tests.support.transformers_reference import load

__all__ = [
    "ENGINE",
    "Drafter",
    "assert_drafted",
    "deepseek_with_head",
    "draft_model",
    "eagle",
    "eagle3",
    "eagle_beside",
    "medusa",
    "parallel",
    "qwen3_next_with_head",
]

Drafter = Callable[[list[int], int], list[int]]
"""Takes the tokens of a request and a number; returns as many drafts."""
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [4, 32],
}
"""An engine for tests of speculation: graphs of one request with three drafts, and of all."""
_SPREAD = 0.1
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "head_dim")
_SIZES += ("num_attention_heads", "num_key_value_heads")
_DRAFT_VOCABULARY = 512  # EAGLE-3's head chooses from some of the tokens


def assert_drafted(target: Path, drafter: Drafter, prompt: list[int], output: list[int], number: int) -> None:
    """Assert that `output`, of an engine that accepts every draft, is the drafts, and the target's choice after them.

    The first token is the target's, too: it is chosen before there are drafts.
    """
    choose = draft_model(target)
    expected = choose(prompt, 1)
    while len(expected) < len(output):
        expected += drafter([*prompt, *output[: len(expected)]], number)
        expected += choose([*prompt, *output[: len(expected)]], 1)
    wrong = [step for step, (one, other) in enumerate(zip(expected, output, strict=False)) if one != other]
    assert not wrong, f"prompt of {len(prompt)} tokens: {output} instead of {expected}, first at {wrong[0]}"


def draft_model(folder: Path) -> Drafter:
    """Return what a whole model drafts."""
    model = load(folder)

    @torch.inference_mode()
    def drafts(tokens: list[int], number: int) -> list[int]:
        for _ in range(number):
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
        return tokens[-number:]

    return drafts


def parallel(folder: Path, masked: int) -> Drafter:
    """Return what a model drafts at once (PARD, arXiv 2504.18583): it reads `masked` in the place of a draft before."""

    @torch.inference_mode()
    def drafts(tokens: list[int], number: int) -> list[int]:
        read = [*tokens, *[masked] * (number - 1)]
        return load(folder)(torch.tensor([read])).logits[0, -number:].argmax(-1).tolist()

    return drafts


def eagle(folder: Path, target: Path, *, seed: int = 5) -> Drafter:
    """Write an EAGLE head (arXiv 2401.15077) for a Llama: a layer without its first norm, and the target's output head."""
    config = _head_config(folder, target)
    head = _made(seed, lambda: _Eagle(config))
    safetensors.torch.save_file(head.state_dict(), folder / "model.safetensors")
    return _drafter(target, head)


def eagle_beside(folder: Path, target: Path, *, seed: int = 5) -> None:
    """Write such a head for a model of any kind; it has a Llama's layer, and the engine alone can say what it drafts."""
    said = json.loads((target / "config.json").read_text())
    said |= said.get("text_config", {})
    sizes = {name: said[name] for name in _SIZES if said.get(name) is not None}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation="eager")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    safetensors.torch.save_file(_made(seed, lambda: _Eagle(config)).state_dict(), folder / "model.safetensors")


def eagle3(folder: Path, target: Path, *, masked: int | None = None, seed: int = 6) -> Drafter:
    """Write an EAGLE-3 head (arXiv 2503.01840) for a Llama, with an output head over a part of the vocabulary.

    With `masked` it drafts at once (P-EAGLE): it reads that token, and a thought of its own, in the place
    of a draft before.
    """
    listened = {"eagle_aux_hidden_state_layer_ids": list(_Eagle3.LISTENED), "draft_vocab_size": _DRAFT_VOCABULARY}
    config = _head_config(folder, target, **listened | ({} if masked is None else {"ptd_token_id": masked}))
    head = _made(seed, lambda: _Eagle3(config))
    weights = head.state_dict()
    if masked is not None:
        weights["mask_hidden"] = torch.randn(1, head.fc.in_features, generator=torch.Generator().manual_seed(seed))
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return _drafter(target, head) if masked is None else _at_once(target, head, masked, weights["mask_hidden"])


def medusa(folder: Path, target: Path, heads: int, *, seed: int = 7) -> Drafter:
    """Write Medusa's heads (arXiv 2401.10774): each drafts for one place, all from the target's last thought."""
    size = load(target).config.hidden_size
    shape = {"hidden_size": size, "vocab_size": models.VOCABULARY, "num_heads": heads, "num_hidden_layers": 1}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "architectures": ["MedusaModel"]} | shape))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(rows, size, generator=generator) * _SPREAD
        for head in range(heads)
        for name, rows in ((f"blocks.{head}.layers.0.weight", size), (f"lm_heads.{head}.weight", models.VOCABULARY))
    }
    safetensors.torch.save_file(weights, folder / "model.safetensors")

    @torch.inference_mode()
    def drafts(tokens: list[int], number: int) -> list[int]:
        thought = load(target).model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
        drafted = []
        for head in range(number):
            block = thought + torch.nn.functional.silu(weights[f"blocks.{head}.layers.0.weight"] @ thought)
            drafted.append(int((weights[f"lm_heads.{head}.weight"] @ block).argmax()))
        return drafted

    return drafts


def deepseek_with_head(folder: Path, *, seed: int = 8, **changes: Any) -> Drafter:
    """Write a DeepSeek-V3 (latent attention, dense) whose checkpoint has a head for multi-token prediction."""
    models.tiny_deepseek_v3(folder, num_nextn_predict_layers=1, **changes)
    config = load(folder).config
    head = _made(seed, lambda: _Mtp(config))
    prefix = f"model.layers.{config.num_hidden_layers}."
    weights = {prefix + name.removeprefix("block."): weight for name, weight in _one_by_one(head.state_dict()).items()}
    file = folder / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | weights, file)
    return _drafter(folder, head)


def _one_by_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with those of experts under their own names, as checkpoints have them."""
    apart: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        before, here, what = name.partition("experts.gate_up_proj" if "gate_up" in name else "experts.down_proj")
        if not here or what:
            apart[name] = weight
            continue
        for number, expert in enumerate(weight):
            place = f"{before}experts.{number}."
            if "gate_up" in here:
                gate, up = expert.chunk(2)
                apart |= {f"{place}gate_proj.weight": gate.clone(), f"{place}up_proj.weight": up.clone()}
            else:
                apart[f"{place}down_proj.weight"] = expert.clone()
    return apart


def qwen3_next_with_head(folder: Path, *, seed: int = 9) -> Drafter:
    """Write a Qwen3-Next (gated delta nets, experts) whose checkpoint has a head for multi-token prediction."""
    models.tiny_qwen3_next(folder, num_nextn_predict_layers=1)
    donor = folder / "donor"
    models.tiny_qwen3_next(donor, seed=seed, num_hidden_layers=1, layer_types=["full_attention"])
    head = _made(seed, lambda: _QwenMtp(load(folder).config))
    layer = {
        name.replace("model.", "mtp."): weight
        for name, weight in safetensors.torch.load_file(donor / "model.safetensors").items()
        if name.startswith("model.layers.")
    }
    weights = {f"mtp.{name}": weight for name, weight in head.state_dict().items()} | layer
    file = folder / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | weights, file)
    head.layer = load(donor).model.layers[0]
    return _drafter(folder, head)


class _Head(torch.nn.Module):
    """A head that goes on from its own thoughts."""

    def listen(self, target: transformers.modeling_outputs.BaseModelOutput) -> torch.Tensor:
        """Return of the target's output what the head goes on from, [1, tokens, hidden size]."""
        return target.last_hidden_state

    def forward(self, target: Any, embeds: torch.Tensor, thoughts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the target's vocabulary and the head's thoughts, [1, tokens, either]."""
        raise NotImplementedError


class _Eagle(_Head):
    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([llama.LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = torch.nn.Identity()

    def forward(self, target: Any, embeds: torch.Tensor, thoughts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(torch.cat((embeds, thoughts), -1))
        x = self.layers[0](x, **_attention(target, x))
        return target.lm_head(x), x


class _Eagle3(_Head):
    LISTENED = (1, 2, 3)
    """After how many of the target's layers it listens."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = torch.nn.Linear(len(self.LISTENED) * size, size, bias=False)
        self.midlayer = llama.LlamaDecoderLayer(config, 0)
        self.midlayer.hidden_norm = llama.LlamaRMSNorm(size, config.rms_norm_eps)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(attention, name).out_features
            setattr(attention, name, torch.nn.Linear(2 * size, width, bias=False))
        self.norm = llama.LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(size, _DRAFT_VOCABULARY, bias=False)
        chosen = torch.randperm(models.VOCABULARY)[:_DRAFT_VOCABULARY].sort().values
        self.register_buffer("d2t", chosen - torch.arange(_DRAFT_VOCABULARY))

    def listen(self, target: transformers.modeling_outputs.BaseModelOutput) -> torch.Tensor:
        return self.fc(torch.cat([target.hidden_states[layer] for layer in self.LISTENED], -1))

    def forward(self, target: Any, embeds: torch.Tensor, thoughts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(thoughts)), -1)
        thoughts = thoughts + layer.self_attn(x, **_attention(target, x))[0]
        thoughts = thoughts + layer.mlp(layer.post_attention_layernorm(thoughts))
        logits = thoughts.new_full((*thoughts.shape[:-1], models.VOCABULARY), -torch.inf)
        logits[..., torch.arange(_DRAFT_VOCABULARY) + self.d2t] = self.lm_head(self.norm(thoughts))
        return logits, thoughts


class _Mtp(_Head):
    """DeepSeek-V3's head (arXiv 2412.19437), which knows no first token."""

    def __init__(self, config: transformers.DeepseekV3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = deepseek.DeepseekV3RMSNorm(size, eps), deepseek.DeepseekV3RMSNorm(size, eps)
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.block = deepseek.DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.shared_head = torch.nn.ModuleDict({"norm": deepseek.DeepseekV3RMSNorm(size, eps)})

    def forward(self, target: Any, embeds: torch.Tensor, thoughts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embeds = torch.cat((torch.zeros_like(embeds[:, :1]), embeds[:, 1:]), 1)
        x = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(thoughts)), -1))
        x = self.shared_head["norm"](self.block(x, **_attention(target, x)))
        return target.lm_head(x), x


class _QwenMtp(_Head):
    """Qwen3-Next's head, whose layer comes from another model."""

    layer: torch.nn.Module

    def __init__(self, config: transformers.Qwen3NextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, name, qwen3_next.Qwen3NextRMSNorm(size, eps))
        self.fc = torch.nn.Linear(2 * size, size, bias=False)

    def forward(self, target: Any, embeds: torch.Tensor, thoughts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(thoughts)), -1))
        x = self.norm(self.layer(x, **_attention(target, x)))
        return target.lm_head(x), x


def _drafter(target_folder: Path, head: _Head) -> Drafter:
    @torch.inference_mode()
    def drafts(tokens: list[int], number: int) -> list[int]:
        target = load(target_folder)
        thoughts = head.listen(target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True))
        tokens = tokens[1:]
        for _ in range(number):
            embeds = target.model.embed_tokens(torch.tensor([tokens]))
            logits, own = head(target, embeds, thoughts)
            tokens = [*tokens, int(logits[0, -1].argmax())]
            thoughts = torch.cat((thoughts, own[:, -1:]), 1)
        return tokens[-number:]

    return drafts


def _at_once(target_folder: Path, head: _Eagle3, masked: int, mask: torch.Tensor) -> Drafter:
    @torch.inference_mode()
    def drafts(tokens: list[int], number: int) -> list[int]:
        target = load(target_folder)
        thoughts = head.listen(target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True))
        thoughts = torch.cat((thoughts, head.fc(mask).expand(1, number - 1, -1)), 1)
        embeds = target.model.embed_tokens(torch.tensor([[*tokens[1:], *[masked] * (number - 1)]]))
        return head(target, embeds, thoughts)[0][0, -number:].argmax(-1).tolist()

    return drafts


def _attention(target: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a decoder layer wants besides x [1, tokens, any]: causal attention at positions from 0."""
    tokens = x.shape[1]
    positions = torch.arange(tokens)[None]
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    rotations = target.model.rotary_emb(x, positions)
    return {"attention_mask": mask, "position_ids": positions, "position_embeddings": rotations}


def _head_config(folder: Path, target: Path, **changes: Any) -> transformers.LlamaConfig:
    """Write and return the configuration of a head of one layer, otherwise as its target's."""
    config = transformers.LlamaConfig.from_pretrained(target, attn_implementation="eager", num_hidden_layers=1)
    config.update(changes)
    config.save_pretrained(folder)
    return config


def _made(seed: int, make: Callable[[], _Head]) -> _Head:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        head = make().eval()
        for weight in head.parameters():
            if weight.dim() > 1:
                weight.normal_(std=_SPREAD)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    return head
