"""Sleep beside other features: what an engine keeps besides its weights and its cache is there again when it wakes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import drafters, models, quantized
from tests.support.adapters import adapter, merged
from tests.support.sleeper import Moment, Step, go_through
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEW = 8
PROMPTS = models.prompt_token_ids([3, 40, 200, 17])
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [1, 4, 16],
    "enable_sleep_mode": True,
    "disable_log_stats": False,
}
WAKE: Step = ["wake_up"]
RELOAD: Step = ["collective_rpc", {"method": "reload_weights"}]
DEEP: list[Step] = [["sleep", {"level": 2}], WAKE, RELOAD]
LIGHT: list[Step] = [["sleep", {"level": 1}], WAKE]
TIER = {
    "kv_connector": "NPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB"},
}
HITS, ACCEPTED, DRAFTED = (
    ["metric", f"vllm:{name}"]
    for name in ("external_prefix_cache_hits", "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")
)


def integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}


SCHEMES = {
    r".*self_attn\.\w+_proj": {
        "weights": integers(8, "channel"),
        "input_activations": integers(8, "token", dynamic=True),
        "format": "int-quantized",
    },
    r".*mlp\.(gate|up)_proj": {"weights": integers(4, "group", group_size=32), "format": "pack-quantized"},
    r".*mlp\.down_proj": {
        "weights": integers(4, "group", group_size=32),
        "input_activations": integers(8, "token", dynamic=True),
        "format": "int-quantized",
    },
}
QUANTISED: dict[str, Callable[[Path], Path]] = {
    "compressed": lambda folder: quantized.compressed(folder, SCHEMES),
    "GPTQ with an order": lambda folder: quantized.gptq(folder, quantized.Rounding(group=128, order=True)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("target") / "llama", num_hidden_layers=2)


def results(moments: list[Moment], steps: list[Step], name: str) -> list[Any]:
    """Return what the steps of a name gave."""
    return [moment.result for moment, step in zip(moments, steps, strict=True) if step[0] == name]


def test_adapters(llama: Path, tmp_path: Path) -> None:
    """At level 2 their memory is lost as well; vLLM reads them again with the weights."""
    model = load(llama)
    one = adapter(tmp_path / "one", model, ["q_proj", "v_proj", "down_proj"], 8, seed=1)
    other = adapter(tmp_path / "other", model, ["o_proj"], 4, seed=2)
    whose = [str(one), str(other), None, str(one)]
    ask: Step = ["generate", PROMPTS, NEW, whose]
    steps = [ask, *LIGHT, ask, *DEEP, ask]
    moments = go_through(tmp_path, steps, model=llama, **ENGINE, enable_lora=True, max_loras=2)
    judges = {None: model, str(one): merged(model, one), str(other): merged(model, other)}
    for outputs in results(moments, steps, "generate"):
        for prompt, output, name in zip(PROMPTS, outputs, whose, strict=True):
            assert_greedy(judges[name], prompt, output)


@pytest.mark.nightly
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights(name: str, tmp_path: Path) -> None:
    """What is packed anew when it is loaded sleeps in that form, and is packed again when it is reloaded."""
    model = QUANTISED[name](tmp_path / "model")
    ask: Step = ["generate", quantized.prompts(4), NEW]
    steps = [ask, *LIGHT, ask, *DEEP, ask]
    moments = go_through(tmp_path, steps, model=model, **ENGINE | {"dtype": "bfloat16"})
    first, *others = results(moments, steps, "generate")
    assert others == [first] * 2


@pytest.mark.nightly
def test_a_host_tier(llama: Path, tmp_path: Path) -> None:
    """It is emptied with the cache, since the weights may be others afterwards, and then serves as before."""
    ask: Step = ["generate", PROMPTS, NEW]
    forget: Step = ["reset_prefix_cache"]
    steps = [ask, forget, ask, HITS, *LIGHT, ask, HITS, forget, ask, HITS, *DEEP, ask, HITS]
    moments = go_through(tmp_path, steps, model=llama, **ENGINE, kv_transfer_config=TIER)
    for outputs in results(moments, steps, "generate"):
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_greedy(load(llama), prompt, output)
    before, asleep, again, deep = results(moments, steps, "metric")
    assert 0 < before == asleep < again == deep


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_drafters(method: str, llama: Path, tmp_path: Path) -> None:
    """Their weights sleep, too. vLLM reloads those of the target alone, so that at level 2 a user keeps the drafter's."""
    if method == "eagle":
        drafters.eagle(tmp_path / "drafter", llama)
    folder = tmp_path / "drafter" if method == "eagle" else llama
    config = {"method": method, "num_speculative_tokens": 3, "model": str(folder)}
    ask: Step = ["generate", PROMPTS, NEW]
    steps = [ask, ACCEPTED, DRAFTED, *LIGHT, ask, ACCEPTED, DRAFTED, *DEEP, ask, ACCEPTED, DRAFTED]
    engine = ENGINE | {"speculative_config": config, "sleep_preserve_parameter_names": ["draft.*"]}
    moments = go_through(tmp_path, steps, model=llama, **engine)
    for outputs in results(moments, steps, "generate"):
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_greedy(load(llama), prompt, output)
    counts = results(moments, steps, "metric")
    accepted, drafted = counts[0::2], counts[1::2]
    assert drafted == [number * drafted[0] for number in (1, 2, 3)]
    assert accepted == [number * accepted[0] for number in (1, 2, 3)]
    assert accepted[0] > 0 or method == "eagle"
