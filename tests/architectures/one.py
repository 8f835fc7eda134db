"""Runs one architecture in small on npu, and says how it compares with transformers in float32.

``serve`` and ``judge`` run in processes of their own and leave the outcome in a folder. Random weights from a seed;
prompts of less than a block, of more than a chunk and a window.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from vllm import ModelRegistry

from tests.architectures.shapes import tiny_config
from tests.support import models
from tests.support.engine_run import look_at

__all__ = [
    "ANSWERS",
    "DIFFERS",
    "ERROR",
    "NOT_MADE",
    "OUTCOME",
    "REFUSED",
    "WORKS",
    "Outcome",
    "judge",
    "serve",
]

WORKS, DIFFERS, REFUSED, ERROR, NOT_MADE = "works", "differs", "refused", "error", "not made"

ANSWERS, OUTCOME = "answers.json", "outcome.json"
MOST_WEIGHTS = 50_000_000
LONGEST = 90  # seconds, after which the log says where it is
SPREAD = 0.1  # of weights that transformers leaves at zero
NEW = 8
PROMPTS = [[token % 500 + 3 for token in prompt] for prompt in models.prompt_token_ids([3, 20, 100], seed=5)]
NEAR = 5e-3  # of a logprob or a part of an embedding, in float32 and other orders of sums
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [4],
}
WITHOUT_MEDIA: dict[str, Any] = {"limit_mm_per_prompt": dict.fromkeys(("image", "video", "audio"), 0)}
GENERATING = ENGINE | {"max_num_batched_tokens": 64, "skip_tokenizer_init": True}
WHOLE = ENGINE | {"max_num_batched_tokens": 256, "skip_tokenizer_init": True}
POOLING = ENGINE | {"max_num_batched_tokens": 256, "runner": "pooling"}
WIDER = ("Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "Cohere2VisionForConditionalGeneration")
"""A token sees one more before it in vLLM than in transformers, as in training (vLLM's commandr.py)."""
IN_ONE_STEP = ("HrmTextForCausalLM",)
"""The tokens of a prompt see each other, so that no step may end within it."""
TWICE, ONCE = "language_model.model.model.", "language_model.model."
TURNED, EXPERTS = ("Qwen3VLMoeForConditionalGeneration",), ("experts.gate_up_proj", "experts.down_proj")
POOLED = {"embedding": "token_embed", "classification": "classify", "token": "token_classify"}


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture; `said` is a sentence, or the greatest error where it works or differs."""

    architecture: str
    kind: str
    outcome: str
    said: str


def serve(architecture: str, kind: str, folder: str) -> None:
    """Make the checkpoint and write the engine's answers, or the outcome if there are none."""
    faulthandler.dump_traceback_later(LONGEST)
    place = Path(folder)
    try:
        _make(architecture, kind, place)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises for a configuration that is too small
        _end(Outcome(architecture, kind, NOT_MADE, _sentence(error)), place)
        return
    try:
        answers = (_pool if kind in ("embedding", "classification") else _generate)(architecture, kind, place)
    except Exception as error:  # noqa: BLE001 - whatever the engine raises
        refusal = _refusal(error)
        outcome = (REFUSED, refusal) if refusal else (ERROR, _sentence(error))
        _end(Outcome(architecture, kind, *outcome), place)
        return
    (place / ANSWERS).write_text(json.dumps(answers))


def judge(architecture: str, kind: str, folder: str) -> None:
    """Write the outcome of what the engine has answered.

    In another process than the engine's, whose code for any model changes transformers' classes.
    """
    place = Path(folder)
    try:
        model = _reference(architecture, place)
        error = _greatest_error(model, json.loads((place / ANSWERS).read_text()))
    except Exception as failure:  # noqa: BLE001 - whatever transformers raises
        _end(Outcome(architecture, kind, NOT_MADE, _sentence(failure)), place)
        return
    _end(Outcome(architecture, kind, WORKS if error < NEAR else DIFFERS, f"{error:.1e}"), place)


def _end(outcome: Outcome, folder: Path) -> None:
    if sys.exc_info()[0]:
        traceback.print_exc()
    (folder / OUTCOME).write_text(json.dumps(asdict(outcome)))


def _make(architecture: str, kind: str, folder: Path) -> None:
    """Write the checkpoint. Raises ValueError where a field that was left as it is makes the model large."""
    config, cls = tiny_config(architecture), getattr(transformers, architecture)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in cls(config).parameters())
    if size > MOST_WEIGHTS:
        msg = f"{size:,} weights are not small: make a field of {type(config).__name__} smaller in shapes.py"
        raise ValueError(msg)
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        models.roughen_vectors(model)
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # experts that a router of zeros chooses are anybody's choice
                weight.normal_(std=SPREAD)
    model.save_pretrained(folder)
    _write_as_published(architecture, folder / "model.safetensors")
    if getattr(config, "enable_audio_output", None) is False:
        torch.save({}, folder / "spk_dict.pt")  # the voices that it speaks with, which transformers loads in any case
    if kind in ("embedding", "classification"):
        models.with_tokenizer(folder)


def _write_as_published(architecture: str, file: Path) -> None:
    """Write weights as published checkpoints have them, where transformers 5 reads those but writes others.

    It names the language model of some models that hear twice over, and does not turn the experts' matrices back.
    """
    weights = safetensors.torch.load_file(file) if file.exists() else {}
    named = {name.replace(TWICE, ONCE): weight for name, weight in weights.items()}
    if architecture in TURNED:
        named |= {name: each.mT.contiguous() for name, each in named.items() if name.endswith(EXPERTS)}
    if named.keys() != weights.keys() or architecture in TURNED:
        safetensors.torch.save_file(named, file, metadata={"format": "pt"})


def _look_at(architecture: str, folder: Path) -> None:
    """Import the model's code here; not that which vLLM keeps for GPUs, which npu refuses by its place."""
    place = getattr(ModelRegistry.models.get(architecture), "module_name", "")
    if not place.startswith("vllm.models."):
        look_at(folder)


def _generate(architecture: str, kind: str, folder: Path) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    _look_at(architecture, folder)
    engine = WHOLE if architecture in IN_ONE_STEP else GENERATING
    llm = LLM(str(folder), **engine | (WITHOUT_MEDIA if kind == "multimodal" else {}))
    parameters = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], parameters, use_tqdm=False)
    chosen = [output.outputs[0] for output in outputs]
    return [
        {
            "tokens": list(one.token_ids),
            "logprobs": [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)],
        }
        for one in chosen
    ]


def _pool(architecture: str, kind: str, folder: Path) -> list[dict[str, Any]]:
    from vllm import LLM

    _look_at(architecture, folder)
    task = POOLED["token" if "TokenClassification" in architecture else kind]
    llm = LLM(str(folder), **POOLING | WITHOUT_MEDIA | {"pooler_config": {"task": task, "use_activation": False}})
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.encode(asked, pooling_task=task, use_tqdm=False)
    return [{"rows": torch.as_tensor(output.outputs.data).float().tolist()} for output in outputs]


def _reference(architecture: str, folder: Path) -> torch.nn.Module:
    """Return transformers' model; made before the engine, whose code for any model changes transformers' modules."""
    cls, config = getattr(transformers, architecture), transformers.AutoConfig.from_pretrained(folder)
    if architecture in WIDER:
        config.get_text_config().sliding_window += 1
    model = cls.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    return getattr(model, "thinker", model)  # of one that also speaks


@torch.inference_mode()
def _greatest_error(model: torch.nn.Module, answers: list[dict[str, Any]]) -> float:
    judge = _error_of_text if "tokens" in answers[0] else _error_of_rows
    return max(judge(model, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True))


def _error_of_text(model: torch.nn.Module, prompt: list[int], answer: dict[str, Any]) -> float:
    """Return how far the chosen tokens' logprobs are from transformers', or from its best tokens'."""
    ids = torch.tensor([prompt + answer["tokens"][:-1]])
    together = type(model).__name__ in IN_ONE_STEP
    seeing = {"token_type_ids": torch.arange(ids.shape[1])[None] < len(prompt)} if together else {}
    logits = model(input_ids=ids, **seeing).logits[0, len(prompt) - 1 :]
    truth = logits.float().log_softmax(-1)
    chosen = truth.gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0]
    off = (torch.tensor(answer["logprobs"]) - chosen).abs().max()
    return max(off.item(), (truth.amax(-1) - chosen).max().item())


def _error_of_rows(model: torch.nn.Module, prompt: list[int], answer: dict[str, Any]) -> float:
    rows, ids = torch.tensor(answer["rows"]), torch.tensor([prompt])
    said = model(input_ids=ids)
    if "embeddings" in said:  # of length one
        rows = torch.nn.functional.normalize(rows, dim=-1)
    truth = next(said[name] for name in ("logits", "embeddings", "last_hidden_state") if name in said)
    if truth.shape[-1] != rows.shape[-1]:  # an embedding model in a checkpoint of another head
        truth = model.base_model(input_ids=ids).last_hidden_state
    return (rows - truth[0].float()).abs().max().item()


def _refusal(error: BaseException) -> str | None:
    """Return npu's own sentence, if it is one that refuses."""
    from npu_ops.errors import UnsupportedLayerError
    from npu_platform.errors import UnsupportedFeatureError

    chain: BaseException | None = error
    while chain is not None:
        for one in (chain, *_wrapped(chain)):
            if isinstance(one, (UnsupportedFeatureError, UnsupportedLayerError)):
                return _sentence(one)
        chain = chain.__cause__ or chain.__context__
    return None


def _wrapped(error: BaseException) -> list[BaseException]:
    """Return the errors that pydantic made one of its own of."""
    details = error.errors() if hasattr(error, "errors") else []
    return [each["ctx"]["error"] for each in details if isinstance(each.get("ctx", {}).get("error"), BaseException)]


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = (lines or [""])[0].partition(" The layer: ")[0]
    return f"{type(error).__name__}: {said[:300]}"
