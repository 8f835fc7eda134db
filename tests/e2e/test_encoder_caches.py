"""What one engine has encoded of an image another reads, by vLLM's connector of encoder caches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import judges, multimodal
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.server import serve
from tests.support.traffic import CHAT_TEMPLATE, image_url

if TYPE_CHECKING:
    from pathlib import Path

    from npu_platform.demo.server import Server

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
SERVED = (
    *("--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "512"),
    *("--chat-template", CHAT_TEMPLATE, "--chat-template-content-format", "openai"),
)


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


def test_a_server_reads_what_another_has_encoded(tmp_path: Path) -> None:
    """Two servers and a client that asks one after the other, as vLLM's proxy of encoders does."""
    model, store = multimodal.tiny_qwen2_5_vl(tmp_path / "model"), tmp_path / "store"
    store.mkdir()

    def transfers(role: str) -> tuple[str, str]:
        where = {"shared_storage_path": str(store)}
        said = {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": where}
        return "--ec-transfer-config", json.dumps(said)

    with serve(model, tmp_path, *SERVED, log="alone.log") as server:
        alone = [seen_by(server, number) for number in range(3)]
    assert len({*alone}) == len(alone)
    with (
        serve(model, tmp_path, *SERVED, *transfers("ec_producer"), log="encoder.log") as encoder,
        serve(model, tmp_path, *SERVED, *transfers("ec_consumer"), log="reader.log") as reader,
    ):
        for number in (0, 1):
            seen_by(encoder, number, 1)
        one, other = sorted(store.rglob("*.safetensors"))
        assert seen_by(reader, 0) == alone[0]
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        assert seen_by(reader, 1) == alone[0], "it reads what is stored"
        assert seen_by(reader, 2) == alone[2], "what is not there is encoded"
        assert sorted(store.rglob("*.safetensors")) == [one, other]


def seen_by(server: Server, number: int, most: int = 12) -> str:
    """Return what a server says to an image; all have as many tokens."""
    url = image_url(number, (56, 56))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "t20 t30"}]
    options = {"temperature": 0, "max_tokens": most, "ignore_eos": True}
    answer = server.ask("/v1/chat/completions", messages=[{"role": "user", "content": content}], **options)
    return answer["choices"][0]["message"]["content"]


def says(run: EngineRun, asked: dict[str, Any], model: Path) -> bool:
    """Return whether an engine said what transformers says to these images."""
    judge = judges.of_images(model)
    requests = zip(judges.requests(asked), run.tokens(0), strict=True)
    return all(judge(request, output).argmax(-1).tolist() == output for request, output in requests)
