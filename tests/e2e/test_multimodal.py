"""Models that see or hear say on npu what they say in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from tests.support import judges, molmo2, multimodal, paligemma
from tests.support.adapters import adapter, merged
from tests.support.engine_run import EngineRun, run_scenarios

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = {"temperature": 0.0, "max_tokens": 12}
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 27, "skip_tokenizer_init": False}
SETTINGS |= {"cudagraph_capture_sizes": [1, 4]}
# image tokens amid those that Qwen's prompts put around them, and a prompt without an image
PROMPTS = [[1, 4, multimodal.IMAGE_TOKEN, 5, 20, 30], [1, 7, 4, multimodal.IMAGE_TOKEN, 5, 20, 30, 40], [1, 20, 30]]
SEEN = {"prompts": PROMPTS, "sampling": GREEDY, "seen": [0, 2, None]}
WATCHED = {
    "prompts": [[1, 4, molmo2.VIDEO, 5, 20, 30], [1, 7, molmo2.VIDEO, 5, 40, 30], [1, 20, 30]],
    "sampling": GREEDY,
    "watched": [0, 1, None],
}
# whose processor puts the image before the text by itself
BEFORE = {"prompts": [[20, 30, 40, 50, 60], [20, 30], [20, 30, 40]], "sampling": GREEDY, "seen": [0, 2, None]}
SEEING = {
    "llava": multimodal.tiny_llava,
    "qwen2.5": multimodal.tiny_qwen2_5_vl,
    "qwen3": multimodal.tiny_qwen3_vl,
    "gemma3": multimodal.tiny_gemma3_seeing,
}
NIGHTLY_TOWERS = (("qwen3", 2), ("qwen2.5", 1))
NORMALISED_BY_THE_HOST = ("qwen3",)  # the others that could be by the device are
RECORDED = [[257, 258], [257, 258, 259], [257, 258, 259, 264], [257]]
HEARD = {"prompts": RECORDED, "sampling": GREEDY, "heard": [0, 1, 2, 3]}
HEARING = {"max_model_len": 64, "max_num_batched_tokens": 1600}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, EngineRun]]:
    folder = tmp_path_factory.mktemp("media")
    made = {name: make(folder / name) for name, make in SEEING.items()}
    by_host = {name: {"mm_device_do_normalize": False} for name in NORMALISED_BY_THE_HOST}
    scenarios = [
        {"engine": SETTINGS | {"model": str(one), "max_model_len": 256} | by_host.get(name, {}), "rounds": [SEEN]}
        for name, one in made.items()
    ]
    made["whisper"] = multimodal.tiny_whisper(folder / "whisper")
    scenarios.append({"engine": SETTINGS | HEARING | {"model": str(made["whisper"])}, "rounds": [HEARD]})
    return {name: (made[name], run) for name, run in zip(made, run_scenarios(folder, scenarios), strict=True)}


@pytest.mark.parametrize("name", SEEING)
def test_images_in_prompts(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = runs[name]
    check(run, judges.of_images(folder), SEEN)


@pytest.mark.nightly
def test_images_before_their_text_whose_tokens_see_each_other(tmp_path: Path) -> None:
    folder = paligemma.tiny_paligemma(tmp_path / "paligemma")
    engine = SETTINGS | {"model": str(folder), "max_model_len": 256}
    (run,) = run_scenarios(tmp_path, [{"engine": engine, "rounds": [BEFORE]}])
    check(run, paligemma.judge(folder), BEFORE)
    request, output = judges.requests(BEFORE)[0], run.tokens(0)[0]
    assert paligemma.judge(folder, causal=True)(request, output).argmax(-1).tolist() != output


def test_recordings_in_a_mixed_batch(runs: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = runs["whisper"]
    judge = judges.of_recordings(folder)
    check(run, judge, HEARD)
    first = run.tokens(0)[0]
    other = judge({"prompts": RECORDED[0], "heard": 3}, first).argmax(-1).tolist()
    assert other != first, "who hears something else says something else"


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen2.5", marks=pytest.mark.nightly)])
def test_ranks_that_encode_an_image_each(name: str, tmp_path: Path) -> None:
    """Of two images, of one that leaves a rank without, and of none."""
    folder = SEEING[name](tmp_path / name)
    alone = {"prompts": PROMPTS[:1], "sampling": GREEDY, "seen": [1]}
    unseen = {"prompts": PROMPTS[2:], "sampling": GREEDY, "seen": [None]}
    engine = SETTINGS | {"model": str(folder), "max_model_len": 256, "mm_device_do_normalize": False}
    ranks = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
    rounds = [SEEN, alone, unseen]
    scenario = {"engine": engine | ranks, "rounds": rounds}
    (run,) = run_scenarios(tmp_path, [scenario], {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB"})
    assert "does not support `--mm-encoder-tp-mode data`" not in run.log
    for number, asked in enumerate(rounds):
        for request, output in zip(judges.requests(asked), run.tokens(number), strict=True):
            assert judges.of_images(folder)(request, output).argmax(-1).tolist() == output


@pytest.mark.parametrize(
    ("name", "ranks"), [("qwen3", 1), *(pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY_TOWERS)]
)
def test_adapters_of_what_sees(name: str, ranks: int, tmp_path: Path) -> None:
    """One adapter of the tower and what connects it, one of the language, and none, whose images share a batch."""
    folder = SEEING[name](tmp_path / name)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    linear = [layer for layer, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    tower = adapter(tmp_path / "tower", model, [layer for layer in linear if "visual" in layer], 8, seed=1)
    language = adapter(tmp_path / "language", model, ["q_proj", "o_proj"], 8, seed=2)
    asked = {
        "prompts": [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[0]],
        "seen": [0, 2, None, 0, 2, 0],
        "lora": [str(tower), None, str(tower), None, str(tower), str(language)],
        "sampling": GREEDY,
    }
    rounds = [asked, {key: value for key, value in asked.items() if key != "lora"}]
    engine = SETTINGS | {"model": str(folder), "max_model_len": 256, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    engine |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_tower_connector_lora": True}
    environ = {"NPU_SIMULATOR_DEVICES": str(ranks), "NPU_SIMULATOR_MEMORY": "2GiB"}
    scenario = {"engine": engine | {"tensor_parallel_size": ranks}, "rounds": rounds}
    (run,) = run_scenarios(tmp_path, [scenario], environ)
    whose = {None: judges.of_seeing(model, folder)}
    whose |= {str(path): judges.of_seeing(merged(model, path), folder) for path in (tower, language)}
    for number, one in enumerate(rounds):
        for request, output in zip(judges.requests(one), run.tokens(number), strict=True):
            assert whose[request.get("lora")](request, output).argmax(-1).tolist() == output
    assert run.tokens(0)[0] != run.tokens(1)[0]


@pytest.mark.nightly
def test_images_and_videos_whose_tokens_see_each_other_in_a_model_that_transformers_has_not(tmp_path: Path) -> None:
    folder = molmo2.tiny_molmo2(tmp_path / "molmo2")
    limits = {"trust_remote_code": True, "limit_mm_per_prompt": {"image": 1, "video": 1}}
    engine = SETTINGS | limits | {"model": str(folder), "max_model_len": 256}
    (run,) = run_scenarios(tmp_path, [{"engine": engine, "rounds": [SEEN, WATCHED]}])
    causal = molmo2.judge(folder, causal=True)
    for number, asked in enumerate((SEEN, WATCHED)):
        check(run, molmo2.judge(folder), asked, number)
        request, output = judges.requests(asked)[0], run.tokens(number)[0]
        assert causal(request, output).argmax(-1).tolist() != output


def check(run: EngineRun, judge: judges.Judge, asked: dict[str, Any], number: int = 0) -> None:
    """Assert that the device, and its graphs, said what the judge says."""
    assert run.platform == "npu"
    assert run.graphs_captured
    for request, output in zip(judges.requests(asked), run.tokens(number), strict=True):
        assert judge(request, output).argmax(-1).tolist() == output
