"""Teaches an EAGLE head what the demo model thinks: ``write_head(folder)``, a minute or two on two cores.

A layer of Llama's that reads a token beside the model's thought before it (arXiv 2401.15077) learns the model's next thought,
by the smooth L1 distance, and its next token, by the cross entropy with the model's own probabilities.
"""

from __future__ import annotations

import time
from pathlib import Path

import safetensors.torch
import torch
import transformers
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from npu_platform.demo import MODEL
from npu_platform.demo.train import Corpus

__all__ = ["write_head"]

STEPS, ROWS, RATE = 400, 8, 2e-3
NEXT_TOKEN = 0.1  # weight of the cross entropy, as in the paper


class Head(torch.nn.Module):
    """Named as vLLM's EagleLlamaForCausalLM loads it: no norm before the layer's attention, no head of its own."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = torch.nn.Identity()

    def forward(
        self, embeds: torch.Tensor, thoughts: torch.Tensor, rotations: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """embeds, thoughts: [rows, tokens, size]; returns the next thoughts, of that shape."""
        x = self.fc(torch.cat((embeds, thoughts), -1))
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        positions = torch.arange(x.shape[1])[None]
        made: torch.Tensor = self.layers[0](
            x, attention_mask=mask, position_ids=positions, position_embeddings=rotations
        )
        return made


def write_head(folder: Path, steps: int = STEPS) -> Path:
    """Train a head for the demo model and write it as a checkpoint."""
    torch.manual_seed(0)
    target = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().requires_grad_(False)
    head = Head(config_of(target, folder))
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    corpus, begin = Corpus(transformers.AutoTokenizer.from_pretrained(MODEL), seed=1), time.monotonic()
    for step in range(steps):
        loss = loss_of(head, target, corpus.batch(ROWS)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"EAGLE head, step {step + 1}: loss {loss.item():.3f}, {time.monotonic() - begin:.0f} s", flush=True)
    weights = {name: weight.to(torch.bfloat16) for name, weight in head.state_dict().items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return folder


def config_of(target: transformers.PreTrainedModel, folder: Path) -> transformers.LlamaConfig:
    """Write and return the head's configuration: a Llama of one layer, of the model's sizes."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    more = ("max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    fields = {name: getattr(target.config, name) for name in (*sizes, *more)}
    config = transformers.LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"], **fields)
    config._attn_implementation = "eager"
    config.save_pretrained(folder)
    return config


def loss_of(head: Head, target: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """tokens: int64 [rows, tokens]."""
    thoughts = target.model(tokens).last_hidden_state
    embeds, before, after = target.model.embed_tokens(tokens[:, 1:]), thoughts[:, :-1], thoughts[:, 1:]
    rotations = target.model.rotary_emb(before, torch.arange(before.shape[1])[None])
    made = head(embeds, before, rotations)
    truth = target.lm_head(after).softmax(-1)
    said = target.lm_head(made).log_softmax(-1)
    return functional.smooth_l1_loss(made, after) - NEXT_TOKEN * (truth * said).sum(-1).mean()
