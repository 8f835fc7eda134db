"""Adapters over HTTP: loaded, listed, replaced and taken away while the server serves, or found by a resolver's plugin."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from npu_platform.demo import MODEL
from tests.support.adapters import adapter, merged
from tests.support.server import serve_demo
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[5, 6, 7, 8], [300, 11, 12], [40] * 30]
OPTIONS = ("--dtype", "float32", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the demo model; "found" is in the resolver's folder, and says whose it is."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {name: folder / name for name in ("one", "other", "third", "found")}
    for seed, (name, path) in enumerate(made.items()):
        adapter(path, load(MODEL), ALL if name == "one" else ["q_proj", "down_proj"], 8, seed)
    config = made["found"] / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(MODEL)}))
    return made


@pytest.fixture(scope="module")
def server(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(adapters["found"].parent),
    }
    with serve_demo(tmp_path_factory.mktemp("serve"), *OPTIONS, **settings) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, trust_env=False)


def tokens(server: Server, model: str, prompt: list[int]) -> httpx.Response:
    options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    return post(server, "/v1/completions", model=model, prompt=prompt, **options)


def assert_answers(server: Server, names: dict[str, Path | None]) -> None:
    """Assert that each name's tokens are its own model's, all prompts and names at a time."""
    cases = [(name, prompt) for name in names for prompt in PROMPTS]
    with ThreadPoolExecutor(len(cases)) as clients:
        answers = list(clients.map(lambda case: tokens(server, *case), cases))
    judges = {name: merged(load(MODEL), path) if path else load(MODEL) for name, path in names.items()}
    for (name, prompt), answer in zip(cases, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert_greedy(judges[name], prompt, answer.json()["choices"][0]["token_ids"])


def served(server: Server) -> set[str]:
    return {model["id"] for model in httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]}


def test_adapters_come_and_go_while_the_server_serves(server: Server, adapters: dict[str, Path]) -> None:
    assert_answers(server, {"demo": None})
    for name in ("one", "other", "third"):  # one more than fit the device at a time
        assert post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(adapters[name])).status_code == 200
    assert served(server) >= {"demo", "one", "other", "third"}
    assert_answers(server, {"demo": None, "one": adapters["one"], "other": adapters["other"]})
    assert_answers(server, {"third": adapters["third"], "one": adapters["one"]})
    assert post(server, "/v1/unload_lora_adapter", lora_name="one").status_code == 200
    assert "one" not in served(server)
    assert_answers(server, {"other": adapters["other"], "demo": None})
    replaced = {"lora_name": "other", "lora_path": str(adapters["one"]), "load_inplace": True}
    assert post(server, "/v1/load_lora_adapter", **replaced).status_code == 200
    assert_answers(server, {"other": adapters["one"], "third": adapters["third"]})


def test_a_resolver_finds_what_nobody_loaded(server: Server, adapters: dict[str, Path]) -> None:
    assert "found" not in served(server)
    assert_answers(server, {"found": adapters["found"], "demo": None})
    assert "found" in served(server)


def test_bad_adapters_are_refused_and_the_server_goes_on(server: Server, tmp_path: Path) -> None:
    too_wide = adapter(tmp_path / "wide", load(MODEL), ["q_proj"], 32, 9)
    refused = post(server, "/v1/load_lora_adapter", lora_name="wide", lora_path=str(too_wide))
    assert refused.status_code in (400, 500)
    assert "rank 32 is greater than max_lora_rank" in refused.text
    nowhere = post(server, "/v1/load_lora_adapter", lora_name="nowhere", lora_path=str(tmp_path / "nowhere"))
    assert nowhere.status_code in (400, 404)
    assert tokens(server, "nobody", PROMPTS[0]).status_code == 404
    assert post(server, "/v1/unload_lora_adapter", lora_name="nobody").status_code == 404
    assert_answers(server, {"demo": None})


@pytest.mark.nightly
def test_ranks_refuse_an_adapter_and_go_on(adapters: dict[str, Path], tmp_path: Path) -> None:
    """What one rank says of an adapter that is not there is not taken for its answer to the next call."""
    settings = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1", "NPU_SIMULATOR_DEVICES": "2"}
    options = (*OPTIONS, "--tensor-parallel-size", "2", "--enable-sleep-mode")
    with serve_demo(tmp_path, *options, **settings) as server:
        for _ in range(2):
            nowhere = post(server, "/v1/load_lora_adapter", lora_name="no", lora_path=str(tmp_path / "nowhere"))
            assert nowhere.status_code == 404
            assert "No adapter found for" in nowhere.text
        assert post(server, "/sleep?level=1").status_code == 200
        assert post(server, "/wake_up").status_code == 200
        loaded = post(server, "/v1/load_lora_adapter", lora_name="one", lora_path=str(adapters["one"]))
        assert loaded.status_code == 200, loaded.text
        assert_answers(server, {"demo": None, "one": adapters["one"]})


PINNED = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
paths = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=1 << 25, enable_lora=True,
          max_loras=2, max_cpu_loras=2, max_lora_rank=16, enable_sleep_mode=True)
engine = llm.llm_engine
requests = [LoRARequest(name, number, path) for number, (name, path) in enumerate(paths.items(), 1)]
said = {"added": [engine.add_lora(request) for request in requests[:2]], "listed": sorted(engine.list_loras())}
said["pinned"] = engine.pin_lora(1)
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
for request in requests[1:]:  # each pushes out another, but not the pinned one
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy, lora_request=request, use_tqdm=False)
said["left"] = sorted(engine.list_loras())
said["removed"] = engine.remove_lora(1)
said["after"] = sorted(engine.list_loras())
llm.sleep(level=1)
said["asleep"] = []
for ask in (lambda: engine.add_lora(requests[0]), lambda: engine.pin_lora(4)):
    try:
        ask()
    except Exception as error:
        said["asleep"].append(str(error))
llm.wake_up()
said["awake"] = engine.add_lora(requests[0])
print("said:" + json.dumps(said))
"""


def test_a_pinned_adapter_stays_and_none_comes_while_the_engine_sleeps(adapters: dict[str, Path]) -> None:
    paths = json.dumps({name: str(path) for name, path in adapters.items()})
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "2GiB"}
    done = run_program(PINNED, str(MODEL), paths, **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    said = json.loads(line.removeprefix("said:"))
    assert said == {
        "added": [True, True],
        "listed": [1, 2],
        "pinned": True,
        "left": [1, 4],
        "removed": True,
        "after": [4],
        "asleep": [
            f"The engine sleeps: wake it up (/wake_up) before adapters are {done}." for done in ("loaded", "pinned")
        ],
        "awake": True,
    }
