"""A small random Molmo 2, which transformers has no code for: its checkpoint, its processor, and who judges what it says.

The language model is a Llama's under other names, so transformers' Llama is the judge of it, with the mask of images;
the tower is written out here. The processor comes with the checkpoint, as the published one does: two crops of four
by four patches, which are pooled to two by two.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from tests.support import molmo2_parts, multimodal
from tests.support.models import roughen_vectors
from tests.support.molmo2_parts import PATCH, POOLED, SIDE, pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.judges import Judge

__all__ = ["IMAGE", "VIDEO", "judge", "tiny_molmo2"]

IMAGE, VIDEO = multimodal.IMAGE_TOKEN, 6
_TIMES = {"0.0": 10, "0.5": 11}  # of a video's frames, before each
_VOCABULARY, _MORE = 512, 16
_PATCH_TOKEN, _COLUMN, _START, _LOW_START, _END = 512, 513, 514, 515, 516
_FRAME_START, _FRAME_END = 518, 519
_WIDTH, _WIDE, _LAYERS, _HEADS = 64, 128, 2, 4  # of the tower
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_molmo2(folder: Path) -> Path:
    """Molmo 2: a vision tower, attention that pools its patches, and a decoder in which an image's tokens see each other."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT))
        roughen_vectors(model)
        weights = _text_weights(model) | _tower_weights()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config()))
    shutil.copy(molmo2_parts.__file__, folder / "molmo2_parts.py")
    known = {"processor_class": "Molmo2Processor", "auto_map": {"AutoProcessor": "molmo2_parts.Molmo2Processor"}}
    (folder / "processor_config.json").write_text(json.dumps(known))
    special = (
        {"<|image|>": IMAGE, "<|video|>": VIDEO}
        | _TIMES
        | {f"<{token}>": token for token in range(_VOCABULARY, _VOCABULARY + _MORE)}
    )
    multimodal.word_tokenizer(special).save_pretrained(folder)
    return folder


def judge(folder: Path, *, causal: bool = False) -> Judge:
    """Judge prompts with an image, a video or neither, as :mod:`tests.support.judges` does.

    A frame's tokens see each other, as an image's do; `causal`: as if no token saw a later.
    """
    weights = load_file(folder / "model.safetensors")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT, attn_implementation="eager"))
    model.load_state_dict(_names_of_llama(weights))
    model.eval()
    wte = torch.cat([weights["model.transformer.wte.embedding"], weights["model.transformer.wte.new_embedding"]])

    def say(request: dict[str, Any], output: list[int]) -> torch.Tensor:
        tokens, features, ranges = request["prompts"], None, []
        if request.get("seen") is not None:
            features = _tower(weights, molmo2_parts.crops_of(multimodal.image(request["seen"])))
            tokens, ranges = _with(tokens, IMAGE, [_shown()])
        elif request.get("watched") is not None:
            crops = molmo2_parts.crops_of_video(multimodal.video(request["watched"])[0])
            features = _tower(weights, crops)
            frame = [_FRAME_START, *[_PATCH_TOKEN] * POOLED**2, _FRAME_END]
            tokens, ranges = _with(tokens, VIDEO, [part for time in _TIMES.values() for part in ([time], frame)])
        ids = torch.tensor(tokens + output[:-1])
        embedded = wte[ids]
        if features is not None:
            embedded[ids == _PATCH_TOKEN] = features
        answer = model(inputs_embeds=embedded[None], attention_mask=_mask(len(ids), [] if causal else ranges))
        return answer.logits[0, -len(output) :].float().log_softmax(-1)

    return torch.inference_mode()(say)


def _config() -> dict[str, Any]:
    heads = {"num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "head_dim": _WIDTH // _HEADS}
    common = heads | {"hidden_size": _WIDTH, "intermediate_size": _WIDE}
    vit = common | {"num_hidden_layers": _LAYERS, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    vit |= {"image_default_input_size": [PATCH * SIDE] * 2, "image_patch_size": PATCH, "image_num_pos": SIDE**2}
    adapter = common | {"vit_layers": [-1, -2], "pooling_attention_mask": False, "hidden_act": "silu"}
    text = _TEXT | {"additional_vocab_size": _MORE, "qkv_bias": False, "hidden_act": "silu", "layer_norm_eps": 1e-6}
    text |= {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    text |= {"use_qk_norm": False, "qk_norm_type": "olmo", "norm_after": False, "rope_scaling_layers": None}
    return {
        "architectures": ["Molmo2ForConditionalGeneration"],
        "model_type": "molmo2",
        "auto_map": {"AutoConfig": "molmo2_parts.Molmo2Config"},
        "dtype": "float32",
        "vit_config": vit,
        "adapter_config": adapter | {"text_hidden_size": _TEXT["hidden_size"]},
        "text_config": text,
        "image_patch_id": _PATCH_TOKEN,
        "image_col_id": _COLUMN,
        "image_start_token_id": _START,
        "image_end_token_id": _END,
        "low_res_image_start_token_id": _LOW_START,
        "image_low_res_id": 517,
        "frame_start_token_id": _FRAME_START,
        "frame_end_token_id": _FRAME_END,
    }


def _with(tokens: list[int], wanted: int, parts: list[list[int]]) -> tuple[list[int], list[range]]:
    """Return the tokens with some parts in the place of one, and where the parts are."""
    place = tokens.index(wanted)
    ends = [place + length for length in itertools.accumulate(map(len, parts), initial=0)]
    return tokens[:place] + list(itertools.chain(*parts)) + tokens[place + 1 :], [
        range(*pair) for pair in itertools.pairwise(ends)
    ]


def _shown() -> list[int]:
    """Return the tokens of an image: a small crop of it and a large one, each a start, its rows, and an end."""
    rows = ([_PATCH_TOKEN] * POOLED + [_COLUMN]) * POOLED
    return [_LOW_START, *rows, _END, _START, *rows, _END]


def _mask(length: int, ranges: list[range]) -> torch.Tensor:
    """Return what is added to the scores where the tokens of each range see each other."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for one in ranges:
        seen[one.start : one.stop, one.start : one.stop] = True
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)


_NAMES = {
    "self_attn.o_proj": "self_attn.attn_out",
    "mlp.down_proj": "mlp.ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
}
_JOINED = {"self_attn.att_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]}
_JOINED |= {"mlp.ff_proj": ["mlp.up_proj", "mlp.gate_proj"]}


def _text_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return a Llama's weights by the names of Molmo 2."""
    state = model.state_dict()
    found = {
        "model.transformer.wte.embedding": state["model.embed_tokens.weight"],
        "model.transformer.wte.new_embedding": torch.randn(_MORE, _TEXT["hidden_size"]) * 0.1,
        "model.transformer.ln_f.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    for layer in range(_TEXT["num_hidden_layers"]):
        ours, theirs = f"model.transformer.blocks.{layer}", f"model.layers.{layer}"
        found |= {f"{ours}.{new}.weight": state[f"{theirs}.{old}.weight"] for old, new in _NAMES.items()}
        for new, parts in _JOINED.items():
            found[f"{ours}.{new}.weight"] = torch.cat([state[f"{theirs}.{part}.weight"] for part in parts])
    return found


def _names_of_llama(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {
        "model.embed_tokens.weight": weights["model.transformer.wte.embedding"],
        "model.norm.weight": weights["model.transformer.ln_f.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    kv, both = _TEXT["num_key_value_heads"] * _TEXT["head_dim"], _TEXT["intermediate_size"]
    sizes = {"self_attn.att_proj": [_TEXT["hidden_size"], kv, kv], "mlp.ff_proj": [both, both]}
    for layer in range(_TEXT["num_hidden_layers"]):
        ours, theirs = f"model.transformer.blocks.{layer}", f"model.layers.{layer}"
        found |= {f"{theirs}.{old}.weight": weights[f"{ours}.{new}.weight"] for old, new in _NAMES.items()}
        for new, parts in _JOINED.items():
            split = weights[f"{ours}.{new}.weight"].split(sizes[new])
            found |= {f"{theirs}.{part}.weight": one for part, one in zip(parts, split, strict=True)}
    return found


def _tower_weights() -> dict[str, torch.Tensor]:
    place, wide = "model.vision_backbone.", _WIDE
    shapes = {"image_vit.patch_embedding": (_WIDTH, 3 * PATCH**2)}
    shapes |= {f"image_pooling_2d.{name}": (_WIDTH, 2 * _WIDTH) for name in ("wq", "wk", "wv")}
    shapes |= {"image_pooling_2d.wo": (_WIDTH, _WIDTH)}
    for layer in range(_LAYERS):
        block = f"image_vit.transformer.resblocks.{layer}."
        shapes |= {f"{block}attention.{name}": (_WIDTH, _WIDTH) for name in ("wq", "wk", "wv", "wo")}
        shapes |= {f"{block}feed_forward.w1": (wide, _WIDTH), f"{block}feed_forward.w2": (_WIDTH, wide)}
    found = {f"{place}{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    found |= {f"{place}{name}.bias": torch.randn(shape[0]) * 0.1 for name, shape in shapes.items()}
    for layer in range(_LAYERS):
        for norm in ("attention_norm", "ffn_norm"):
            name = f"{place}image_vit.transformer.resblocks.{layer}.{norm}"
            found |= {f"{name}.weight": 1 + torch.randn(_WIDTH) * 0.2, f"{name}.bias": torch.randn(_WIDTH) * 0.2}
    found[f"{place}image_vit.positional_embedding"] = torch.randn(SIDE**2, _WIDTH) * 0.3
    projector = {"w1": (wide, _WIDTH), "w3": (wide, _WIDTH), "w2": (_TEXT["hidden_size"], wide)}
    return found | {f"{place}image_projector.{name}.weight": torch.randn(s) * 0.1 for name, s in projector.items()}


def _tower(weights: dict[str, torch.Tensor], crops: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the features of the patch tokens of an image's or video's crops, [tokens, hidden size]."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        name = f"model.vision_backbone.{name}"
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        name = f"model.vision_backbone.{name}"
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    def attend(query: torch.Tensor, key: torch.Tensor, name: str) -> torch.Tensor:
        parts = linear(query, f"{name}.wq"), linear(key, f"{name}.wk"), linear(key, f"{name}.wv")
        q, k, v = (one.unflatten(-1, (_HEADS, -1)).transpose(-3, -2) for one in parts)
        scores = (q @ k.transpose(-1, -2) / (_WIDTH // _HEADS) ** 0.5).softmax(-1)
        return linear((scores @ v).transpose(-3, -2).flatten(-2), f"{name}.wo")

    x = linear(torch.stack(list(crops)), "image_vit.patch_embedding")
    x = x + weights["model.vision_backbone.image_vit.positional_embedding"]
    layers = []
    for layer in range(_LAYERS):
        block = f"image_vit.transformer.resblocks.{layer}."
        inner = norm(x, f"{block}attention_norm")
        x = x + attend(inner, inner, f"{block}attention")
        inner = F.gelu(linear(norm(x, f"{block}ffn_norm"), f"{block}feed_forward.w1"), approximate="tanh")
        x = x + linear(inner, f"{block}feed_forward.w2")
        layers.append(x)
    patches = torch.cat([layers[-1], layers[-2]], dim=-1)
    groups = pooled(patches.flatten(0, 1))
    x = attend(groups.mean(1, keepdim=True), groups, "image_pooling_2d")[:, 0]
    inner = F.silu(linear(x, "image_projector.w1")) * linear(x, "image_projector.w3")
    return linear(inner, "image_projector.w2")
