"""A cache of the hub with small random models whose tokens are bytes, for tests that read and write text."""

from __future__ import annotations

import json
import string
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
import transformers

from tests.support import adapters, drafters, models, multimodal
from tests.vllm_tests import hub

if TYPE_CHECKING:
    from collections.abc import Callable

_LENGTH = {"max_position_embeddings": 32768}
_SORTED = 34000  # tokens of Qwen2 that sorts: the largest id that tests name is 33808; E5's is 133888
_E5_TOKENS = 134000
_NAMED = 6144  # tokens of Qwen2.5 of which tests ask for the logprobs of 5000
_E5_PIECES = {
    "<s>": 0,
    "</s>": 2,
    "The": 581,
    " best": 2965,
    " thing": 13580,
    " about": 1672,
    " v": 81,
    "LL": 23708,
    "M": 594,
}
_E5_PIECES |= {" is": 83, " that": 450, " it": 442, " support": 8060, "s": 7, " many": 5941, " different": 12921}
_E5_PIECES |= {" models": 115774, " chef": 21861, " prepared": 133888, " a": 10, " de": 8, "li": 150, "cious": 60744}
_E5_PIECES |= {" meal": 109911, ".": 5}
_QWEN_PIECES = {"The": 785, " chef": 29706, " prepared": 10030, " a": 264, " delicious": 17923, " meal": 15145, ".": 13}
_QWEN_PIECES |= {"This": 1986, " product": 1985, " was": 572, " excellent": 9073, " and": 323, " exceeded": 33808}
_QWEN_PIECES |= {" my": 847, " expectations": 16665}
_TEXT = (
    "the of and to in is that it for was on are with as be at this have from or one had by but not what all were we any key"
    " skill times sentence following award who contribution describe detail name my president capital future hello am Gyoubu Oniwa"
)
_WORDS = (*string.ascii_letters, *string.digits, *_TEXT.split())
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHAT_WITH_PICTURES = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }}\n{% endfor %}assistant :"
)
_LLAMA_ENDS = {"<|end_of_text|>": 128001, "<|eot_id|>": 128009}  # the ids that vLLM's tests of Llama 3.2 name


def _of_bytes(make: Callable[..., Path], size: int = models.VOCABULARY, **options: Any) -> Callable[[Path], Path]:
    """Return a maker whose model has, in the place of another tokenizer, one of `size` bytes and words that knows chats."""

    def made(folder: Path) -> Path:
        make(folder, **options)
        hub.add_bytes_tokenizer(folder, size, _WORDS, ("Hello",), _SPECIAL, _CHAT)
        return folder

    return made


def _pooling(
    make: Callable[..., Path], pieces: dict[str, int] | None = None, size: int = models.VOCABULARY, **options: Any
) -> Callable[[Path], Path]:
    """Return a maker of bytes whose tokenizer can pad, and has the ids that tests name for `pieces` of their texts."""

    def made(folder: Path) -> Path:
        _of_bytes(make, size, **options)(folder)
        place = folder / "tokenizer_config.json"
        said = json.loads(place.read_text())
        place.write_text(json.dumps(said | {"pad_token": said["eos_token"]}))
        _name(folder / "tokenizer.json", pieces or {})
        return folder

    return made


def _name(place: Path, pieces: dict[str, int]) -> None:
    """Give pieces of text the ids that tests name; what had such an id gets that of a word without a meaning."""
    said = json.loads(place.read_text())
    vocabulary, free = said["model"]["vocab"], max(pieces.values(), default=0)
    words = {number: word for word, number in vocabulary.items()}
    for piece, number in pieces.items():
        word = words[number]
        del vocabulary[word]
        if not word.startswith("<w"):
            free = next(other for other in range(free - 1, 0, -1) if words[other].startswith("<w"))
            del vocabulary[words[free]]
            vocabulary[word] = free
        vocabulary[piece] = number
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    said["added_tokens"] += [{"id": number, "content": piece} | added for piece, number in pieces.items()]
    place.write_text(json.dumps(said))


def _generating(make: Callable[[Path], Path], **said: Any) -> Callable[[Path], Path]:
    """Return a maker whose model's file about its texts says more: real models end a text long before it is full."""

    def made(folder: Path) -> Path:
        place = make(folder) / "generation_config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | said))
        return folder

    return made


def _silent(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Return a maker whose tokenizer knows no chats: sentence-transformers would write a pair of texts as one."""

    def made(folder: Path) -> Path:
        (make(folder) / "chat_template.jinja").unlink()
        return folder

    return made


def _framed(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Return a maker whose texts lie between the tokens 0 and 2, as XLM-R's do."""

    def made(folder: Path) -> Path:
        place = str(make(folder) / "tokenizer.json")
        tokenizer = tokenizers.Tokenizer.from_file(place)
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        tokenizer.save(place)
        return folder

    return made


def _llama_base(folder: Path) -> Path:
    _of_bytes(models.tiny_llama, **_LENGTH)(folder)
    place = folder / "tokenizer.json"
    said = json.loads(place.read_text())
    said["model"]["vocab"] |= _LLAMA_ENDS
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    said["added_tokens"] += [{"id": number, "content": word} | added for word, number in _LLAMA_ENDS.items()]
    place.write_text(json.dumps(said))
    place = folder / "tokenizer_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"eos_token": "<|end_of_text|>"}))
    return folder


def _gemma3(folder: Path) -> Path:
    """Gemma 3 1B's layers: 22 of a window and 4 of all make seven groups of caches."""
    kinds = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(26)]
    return models.tiny_gemma3(folder, num_hidden_layers=26, layer_types=kinds, sliding_window=512, **_LENGTH)


def _seeing(make: Callable[..., Path]) -> Callable[[Path], Path]:
    """Return a maker whose model has the positions that tests ask for, and knows chats."""

    def made(folder: Path) -> Path:
        make(folder, max_position_embeddings=4096)
        (folder / "chat_template.jinja").write_text(_CHAT_WITH_PICTURES)
        return folder

    return made


def _llava(folder: Path, **options: Any) -> Path:
    """LLaVA whose texts begin with a token, as they do there."""
    place = str(multimodal.tiny_llava(folder, **options) / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(place)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="t1 $A", special_tokens=[("t1", 1)])
    tokenizer.save(place)
    return folder


def _qwen2_vl(folder: Path) -> Path:
    vision = {"depth": 2, "embed_dim": 128, "hidden_size": 256, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    text = multimodal._QWEN_TEXT | {"rope_parameters": multimodal._positions([4, 6, 6])} | _LENGTH
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config=text, **multimodal._QWEN_TOKENS)
    processor = (transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor, 14)
    return multimodal._save_qwen(transformers.Qwen2VLForConditionalGeneration, config, processor, folder)


def _sorter(folder: Path) -> Path:
    """Qwen2 with a head that sorts texts."""
    labels = {"id2label": {0: "Default", 1: "Spoiled"}, "label2id": {"Default": 0, "Spoiled": 1}}
    shape = hub._SMALL | _LENGTH | {"vocab_size": _SORTED, "pad_token_id": _SORTED - 1} | labels
    model = transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**shape))
    model.save_pretrained(folder)
    return folder


def _ranker(folder: Path) -> Path:
    """Qwen3 with a head of one number, by which pairs of texts are ranked."""
    shape = hub._SMALL | _LENGTH | {"num_labels": 1, "pad_token_id": models.VOCABULARY - 1}
    transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**shape)).save_pretrained(folder)
    return folder


def _encoder(folder: Path, width: int, tokens: int = models.VOCABULARY) -> Path:
    """BERT whose vector of a text is the mean of its tokens', of length one, as E5 and MiniLM say in their files."""
    models.tiny_bert(folder, hidden_size=width, num_attention_heads=width // 64, vocab_size=tokens)
    kinds = ("models.Transformer", "models.Pooling", "models.Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    parts = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": width, "pooling_mode_mean_tokens": True})
    )
    return folder


def _with_target(make: Callable[[Path, Path], Any]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        with tempfile.TemporaryDirectory() as place:
            folder.mkdir(parents=True)
            make(folder, models.tiny_llama(Path(place) / "target", **_LENGTH))
        return folder

    return made


def _adapter_of(make: Callable[[Path], Path], *modules: str, seed: int = 0) -> Callable[[Path], Path]:
    """Return a maker of an adapter of a model's layers."""

    def made(folder: Path) -> Path:
        with tempfile.TemporaryDirectory() as place:
            model = transformers.AutoModelForCausalLM.from_pretrained(make(Path(place) / "model"))
        return adapters.adapter(folder, model, list(modules), 8, seed)

    return made


def _pard(folder: Path) -> Path:
    """A draft model that drafts at once: its configuration says which token stands for a draft."""
    return _changed(models.tiny_llama(folder, **_LENGTH), pard_token=5)


def _dflash(folder: Path) -> Path:
    """The configuration of DFlash's head for Qwen3; what tests make of it never reads its weights."""
    said = {"mask_token_id": 5, "target_layer_ids": [1, 2]}
    return _changed(
        models.tiny_qwen3(folder, **_LENGTH), architectures=["DFlashDraftModel"], block_size=16, dflash_config=said
    )


def _mimo(folder: Path) -> Path:
    """Qwen2 with the name of MiMo and one layer that drafts, of which tests read the configuration alone."""
    shape = transformers.Qwen2Config(**hub._SMALL | _LENGTH)
    return _changed(models._save(shape, folder, 0), architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)


def _changed(folder: Path, **changes: Any) -> Path:
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))
    return folder


_LLAMA = _of_bytes(models.tiny_llama, **_LENGTH)
_QWEN2 = _of_bytes(lambda folder: models._save(transformers.Qwen2Config(**hub._SMALL | _LENGTH), folder, 0))
_QWEN2_5 = _of_bytes(
    lambda folder: models._save(transformers.Qwen2Config(**hub._SMALL | _LENGTH | {"vocab_size": _NAMED}), folder, 0),
    _NAMED,
)
_QWEN3 = _of_bytes(models.tiny_qwen3, **_LENGTH)
_E5 = _framed(_pooling(_encoder, _E5_PIECES, _E5_TOKENS, width=384, tokens=_E5_TOKENS))
_MINILM = _pooling(_encoder, width=384)
_BGE = _pooling(_encoder, width=768)
_OPT_125M = _of_bytes(hub.opt, heads=12)
_RERANKER = _silent(_pooling(models.tiny_classifier, labels=1))

MODELS: dict[str, hub.Make] = {
    "hmellor/tiny-random-LlamaForCausalLM": _LLAMA,
    "meta-llama/Llama-3.2-1B": _llama_base,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _LLAMA,
    "JackFram/llama-160m": _LLAMA,
    "meta-llama/llama-2-7b-hf": _LLAMA,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _LLAMA,
    "HuggingFaceH4/zephyr-7b-beta": _generating(_LLAMA, max_new_tokens=256),
    "mistralai/Mistral-7B-Instruct-v0.1": _LLAMA,
    "facebook/opt-125m": _OPT_125M,
    "facebook/opt-350m": _of_bytes(hub.opt),
    "Qwen/Qwen1.5-7B": _QWEN2,
    "Qwen/Qwen3-0.6B": _QWEN3,
    "Qwen/Qwen3-4B": _QWEN3,
    "Qwen/Qwen3-8B": _QWEN3,
    "Qwen/Qwen2-1.5B-Instruct": _generating(_QWEN2, eos_token_id=[*range(1024, models.VOCABULARY, 64)]),
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN2,
    "Qwen/Qwen2.5-1.5B-Instruct": _generating(_QWEN2_5, max_new_tokens=256),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN2,
    "luccafong/deepseek_mtp_main_random": hub.deepseek_mtp,
    "luccafong/deepseek_mtp_draft_random": hub.deepseek_mtp,
    "openai-community/gpt2": hub.gpt2,
    "gpt2": hub.gpt2,
    "distilbert/distilgpt2": hub.gpt2,
    "google/gemma-3-1b-it": _of_bytes(_gemma3),
    "deepseek-ai/DeepSeek-V2-Lite": _of_bytes(models.tiny_deepseek_v2, **_LENGTH),
    "ibm-research/PowerMoE-3b": _of_bytes(hub.granite_moe),
    "TitanML/tiny-mixtral": _of_bytes(models.tiny_mixtral, **_LENGTH, num_hidden_layers=2),
    "openai/gpt-oss-20b": _of_bytes(models.tiny_gpt_oss, **_LENGTH),
    "llava-hf/llava-1.5-7b-hf": _seeing(_llava),
    "Qwen/Qwen2-VL-2B-Instruct": _qwen2_vl,
    "Qwen/Qwen2.5-VL-3B-Instruct": _seeing(multimodal.tiny_qwen2_5_vl),
    "Qwen/Qwen3-VL-2B-Instruct": _seeing(multimodal.tiny_qwen3_vl),
    "HuggingFaceTB/SmolVLM-256M-Instruct": _seeing(multimodal.tiny_qwen2_5_vl),
    "intfloat/multilingual-e5-small": _E5,
    "sentence-transformers/all-MiniLM-L12-v2": _MINILM,
    "BAAI/bge-base-en-v1.5": _BGE,
    "jason9693/Qwen2.5-1.5B-apeach": _pooling(_sorter, _QWEN_PIECES, _SORTED),
    "Snowflake/snowflake-arctic-embed-m-v1.5": _BGE,
    "BAAI/bge-reranker-base": _RERANKER,
    "BAAI/bge-reranker-v2-m3": _RERANKER,
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": _silent(_pooling(_ranker)),
    "openai/whisper-large-v3": multimodal.tiny_whisper,
    "openai/whisper-small": multimodal.tiny_whisper,
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": _with_target(drafters.eagle),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": _with_target(drafters.eagle),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": _with_target(drafters.eagle3),
    "nm-testing/Llama3_2_1B_speculator.eagle3": _with_target(drafters.eagle3),
    "amd/PARD-Llama-3.2-1B": _of_bytes(_pard),
    "z-lab/Qwen3-8B-DFlash-b16": _of_bytes(_dflash),
    "XiaomiMiMo/MiMo-7B-Base": _of_bytes(_mimo),
    "charent/self_cognition_Alice": _adapter_of(_QWEN3, "q_proj", "v_proj"),
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": _adapter_of(_QWEN3, "q_proj", "v_proj", seed=1),
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": _adapter_of(_QWEN3, "q_proj", "v_proj", seed=2),
    "peft-internal-testing/opt-125m-dummy-lora": _adapter_of(_OPT_125M, "q_proj", "v_proj"),
    "typeof/zephyr-7b-beta-lora": _adapter_of(_LLAMA, "q_proj", "v_proj"),
    "jekunz/smollm-135m-lora-fineweb-faroese": _adapter_of(_LLAMA, "q_proj", "v_proj"),
}
_PICTURES = (
    "stop_sign.jpg",
    "cherry_blossom.jpg",
    "2560px-Gfp-wisconsin-madison-the-nature-boardwalk.jpg",
    "Grayscale_8bits_palette_sample_image.png",
    "1280px-Venn_diagram_rgb.svg.png",
    "RGBA_comp.png",
)


def fill(home: Path, assets: Path) -> None:
    """Write the models, and the pictures that tests show them, that are not there yet."""
    hub.fill(home / "hub", MODELS)
    pictures = assets / "vllm_public_assets"
    pictures.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(_PICTURES):
        multimodal.image(seed).save(pictures / name)
    # what LLaVA's projector would make of a picture
    torch.save(torch.zeros(1, multimodal.IMAGE_TOKENS, 256), pictures / "stop_sign.pt")
