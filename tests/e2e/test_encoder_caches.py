"""What one engine has encoded of an image another reads, by vLLM's connector of encoder caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import judges, multimodal
from tests.support.engine_run import EngineRun, run_scenarios

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

GREEDY = {"temperature": 0.0, "max_tokens": 12}
PROMPTS = [[1, multimodal.IMAGE_TOKEN, 20, 30], [1, 7, multimodal.IMAGE_TOKEN, 20, 30, 40], [1, 20, 30]]
SEEN = {"prompts": PROMPTS, "sampling": GREEDY, "seen": [0, 2, None]}
EXCHANGED = SEEN | {"seen": [2, 0, None]}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 27,
    "max_model_len": 256,
    "skip_tokenizer_init": False,
    "cudagraph_capture_sizes": [1, 4],
}


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_an_engine_reads_what_another_has_encoded(runner: str, tmp_path: Path) -> None:
    """Gemma 3's images have as many tokens each: two of them, exchanged in the store, show in what is said."""
    model, store = multimodal.tiny_gemma3_seeing(tmp_path / "model"), tmp_path / "store"
    store.mkdir()

    def run(role: str, *rounds: dict[str, Any]) -> EngineRun:
        transfer = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": str(store)},
        }
        engine = ENGINE | {"model": str(model), "ec_transfer_config": transfer}
        environ = {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
        (outcome,) = run_scenarios(tmp_path / role, [{"engine": engine, "rounds": list(rounds)}], environ)
        assert (outcome.platform, outcome.runner) == ("npu", runner)
        return outcome

    assert says(run("ec_both", SEEN), SEEN, model)
    one, other = sorted(store.rglob("*.safetensors"))
    assert says(run("ec_consumer", SEEN), SEEN, model)
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    assert says(run("ec_consumer", SEEN), EXCHANGED, model)
    one.unlink()
    other.unlink()
    assert says(run("ec_consumer", SEEN), SEEN, model), "what is not there is encoded"
    assert not [*store.rglob("*.safetensors")]
    assert run("ec_producer", SEEN).tokens(0) == [[], [], []], "vLLM has it encode, and nothing else"
    assert sorted(file.read_bytes() for file in (one, other)) == sorted(contents)


def says(run: EngineRun, asked: dict[str, Any], model: Path) -> bool:
    """Return whether an engine said what transformers says to these images."""
    judge = judges.of_images(model)
    requests = zip(judges.requests(asked), run.tokens(0), strict=True)
    return all(judge(request, output).argmax(-1).tolist() == output for request, output in requests)
