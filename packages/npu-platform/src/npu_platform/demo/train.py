"""Trains the demo model from nothing, in minutes on one CPU core: ``python -m npu_platform.demo.train --output DIR``.

The corpus is generated from ``facts``. A byte-level BPE tokenizer and a three-layer Qwen3 of two million weights are
made with tokenizers and transformers, trained with plain torch on the CPU, rounded to bfloat16, saved and checked on
every fact. Nothing of this runs when the model is served.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
from pathlib import Path

import tokenizers
import torch
import transformers

from npu_platform.demo.facts import Fact, all_facts, count

__all__ = ["main"]

VOCABULARY = 896
ROW = 160  # tokens of one training row: several conversations, one after the other
IGNORED = -100  # label of a token that gives no loss: everything that the model will not have to say
END, USER, ASSISTANT, SYSTEM = SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(arguments: list[str] | None = None) -> int:
    """Train, check and save; the exit code is 0 if at least 95 % of all facts are answered right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer, options)
    model = model.to(torch.bfloat16)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    right = share_right(model.float(), tokenizer)  # rounded weights, but float32 products: the others are slow
    print(f"{right:.1%} of {len(all_facts())} facts answered right")
    return 0 if right >= 0.95 else 1


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Train byte-level BPE on the corpus, so that every text, JSON included, can be read and said."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for fact in all_facts() for text in (fact.question, *fact.ways, fact.answer)]
    bpe.train_from_iterator(texts, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    """Return the untrained model in float32."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def train(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, options: argparse.Namespace
) -> None:
    """AdamW with a one-cycle rate; loss on answers only."""
    corpus = Corpus(tokenizer, options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=options.steps, pct_start=0.1)
    begin = time.monotonic()
    for step in range(options.steps):
        tokens, labels = corpus.batch(options.rows)
        hidden = model.model(input_ids=tokens).last_hidden_state
        said = labels[:, 1:] != IGNORED
        logits = model.lm_head(hidden[:, :-1][said])
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][said])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - begin:.0f} s", flush=True)


class Corpus:
    """An endless stream of conversations about the facts, in random order and wording."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._by_topic: dict[str, list[Fact]] = collections.defaultdict(list)
        for fact in all_facts():
            self._by_topic[fact.topic].append(fact)
        self._weights = [len(facts) ** 0.5 for facts in self._by_topic.values()]
        self._encoded: dict[str, list[int]] = {}

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and labels, each int64 [rows, ROW]."""
        tokens, labels = zip(*(self._row() for _ in range(rows)), strict=True)
        return torch.tensor(tokens), torch.tensor(labels)

    def _row(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        labels: list[int] = []
        while len(tokens) < ROW:
            asked, said = self._conversation()
            tokens += asked + said
            labels += [IGNORED] * len(asked) + said
        return tokens[:ROW], labels[:ROW]

    def _conversation(self) -> tuple[list[int], list[int]]:
        (topic,) = self._random.choices(list(self._by_topic), self._weights)
        fact = self._random.choice(self._by_topic[topic])
        if topic == "count":
            first = self._random.randint(1, 30)
            fact = count(first, first + self._random.randint(3, 24))
        chance = self._random.random()
        if chance < 0.15 and " is " in fact.answer:
            # As plain text, for the completions endpoint.
            start, word, rest = fact.answer.rpartition(" is")
            return self._encode(f"{start}{word}"), self._encode(f"{rest}{END}")
        question = self._random.choice((fact.question, fact.question, *fact.ways))
        system = f"{SYSTEM}You are a helpful assistant.{END}" if chance > 0.95 else ""
        return self._encode(f"{system}{USER}{question}{END}{ASSISTANT}"), self._encode(f"{fact.answer}{END}")

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self._tokenizer.encode(text)
        return self._encoded[text]


def share_right(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast) -> float:
    """Ask every question greedily through the chat template and return the share of exact answers."""
    tokenizer.padding_side = "left"
    wrong: collections.Counter[str] = collections.Counter()
    facts = sorted(all_facts(), key=lambda fact: (fact.topic, len(fact.answer)))
    for begin in range(0, len(facts), 64):
        group = facts[begin : begin + 64]
        texts = [f"{USER}{fact.question}{END}{ASSISTANT}" for fact in group]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        longest = max(len(tokenizer.encode(fact.answer)) for fact in group)
        output = model.generate(**inputs, max_new_tokens=longest + 1, do_sample=False)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for fact, answer in zip(group, answers, strict=True):
            if answer != fact.answer:
                wrong[fact.topic] += 1
                print(f"wrong: {fact.question} -> {answer}")
    return 1 - wrong.total() / len(facts)


if __name__ == "__main__":
    sys.exit(main())
