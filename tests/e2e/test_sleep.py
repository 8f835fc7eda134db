"""Sleep mode: memory goes back to the device and the system, and the same tokens come after it, from the same graphs."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support import models
from tests.support.server import serve_demo, until
from tests.support.sleeper import Moment, Step, go_through
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npu_platform.demo.server import Server

MIB = 1 << 20
NEW = 8
PROMPTS = models.prompt_token_ids([3, 40, 200, 17])
WIDE: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 3}
WEIGHTS = 80 * MIB
"""Fewer bytes than the weights of a model of these sizes take in float32."""
CACHE = 64 * MIB
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": CACHE,
    "cudagraph_capture_sizes": [1, 4],
    "enable_sleep_mode": True,
}
ABANDONED = """
import json, sys
from vllm import LLM, SamplingParams
engine = LLM(**json.loads(sys.argv[1])).llm_engine
said = {"V2": engine.vllm_config.use_v2_model_runner}
params = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True, detokenize=False)
for number, ids in enumerate(json.loads(sys.argv[2])):
    engine.add_request(str(number), {"prompt_token_ids": ids}, params)
for _ in range(3):
    engine.step()
engine.sleep(level=1, mode="keep")
engine.abort_request(["1"])
engine.step()
engine.wake_up()
while engine.has_unfinished_requests():
    said |= {one.request_id: list(one.outputs[0].token_ids) for one in engine.step() if one.finished}
print("SAID " + json.dumps(said))
"""
GENERATE: Step = ["generate", PROMPTS, NEW]
CHECKSUMS: Step = ["collective_rpc", {"method": "compute_weight_checksums"}]
RELOAD: Step = ["collective_rpc", {"method": "reload_weights"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the same sizes."""
    folder = tmp_path_factory.mktemp("models")
    return models.tiny_llama(folder / "one", **WIDE), models.tiny_llama(folder / "other", seed=1, **WIDE)


@pytest.fixture(scope="module")
def day(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Moment]:
    """An engine's day: each level, tags by themselves, and weights of another model."""
    one, other = folders
    reload_other: Step = ["collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}]
    steps: dict[str, Step] = {
        "first": GENERATE,  # after which the process has what a first generation takes once
        "fresh": GENERATE,
        "fresh weights": CHECKSUMS,
        "level 1": ["sleep", {"level": 1}],
        "up from 1": ["wake_up"],
        "weights from 1": CHECKSUMS,
        "tokens from 1": GENERATE,
        "level 2": ["sleep", {"level": 2}],
        "weights up": ["wake_up", {"tags": ["weights"]}],
        "weights gone": CHECKSUMS,
        "reloaded": RELOAD,
        "all up": ["wake_up", {"tags": ["kv_cache"]}],
        "weights from 2": CHECKSUMS,
        "tokens from 2": GENERATE,
        "other weights": reload_other,
        "no old prefixes": ["reset_prefix_cache"],
        "other tokens": GENERATE,
        "level 0": ["sleep", {"level": 0}],
        "up from 0": ["wake_up", {"tags": ["scheduling"]}],
    }
    # Of 2 MiB each, pages come as the machine has them at the moment: the same cache once takes 20 MiB more than before.
    small = {"NPU_HUGE_PAGES": "0"}
    moments = go_through(tmp_path_factory.mktemp("day"), list(steps.values()), small, model=one, **ENGINE)
    return dict(zip(steps, moments, strict=True))


def test_level_1_keeps_the_weights_and_frees_the_device(day: dict[str, Moment]) -> None:
    assert day["level 1"].free >= day["fresh"].free + WEIGHTS + CACHE
    assert day["level 1"].sleeping
    assert not day["up from 1"].sleeping
    assert day["weights from 1"].result == day["fresh weights"].result
    assert day["tokens from 1"].result == day["fresh"].result
    assert day["tokens from 1"].resident <= day["fresh weights"].resident + 16 * MIB  # checksums took some, once


def test_level_2_gives_the_weights_memory_to_the_system(day: dict[str, Moment]) -> None:
    assert day["level 2"].free >= day["fresh"].free + WEIGHTS + CACHE
    assert day["level 2"].resident <= day["tokens from 1"].resident - WEIGHTS


def test_after_level_2_the_weights_are_loaded_again_under_the_same_graphs(day: dict[str, Moment]) -> None:
    assert day["weights up"].sleeping, "the cache sleeps on"
    assert WEIGHTS <= day["level 2"].free - day["weights up"].free <= day["level 2"].free - day["fresh"].free - CACHE
    assert day["weights gone"].result != day["fresh weights"].result
    assert not day["all up"].sleeping
    assert day["weights from 2"].result == day["fresh weights"].result
    assert day["tokens from 2"].result == day["fresh"].result


def test_other_weights_are_those_of_the_other_model(day: dict[str, Moment], folders: tuple[Path, Path]) -> None:
    for model, moment in zip(folders, ("fresh", "other tokens"), strict=True):
        for prompt, tokens in zip(PROMPTS, day[moment].result, strict=True):
            assert_greedy(load(model), prompt, tokens)


def test_level_0_pauses_and_keeps_all_memory(day: dict[str, Moment]) -> None:
    assert day["level 0"].free == day["other tokens"].free
    assert day["level 0"].sleeping
    assert not day["up from 0"].sleeping


def test_a_folder_keeps_what_sleeps_out_of_the_hosts_memory(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """So do the graphs' own memory and parameters that a level 2 is to preserve."""
    steps = [CHECKSUMS, GENERATE, ["sleep", {"level": 1}], ["wake_up"], GENERATE, ["sleep", {"level": 2}], ["wake_up"]]
    settings = {
        "sleep_mode_offload_cudagraph": True,
        "sleep_preserve_parameter_names": ["*"],
        "additional_config": {"npu": {"sleep_folder": str(tmp_path)}},
    }
    engine = ENGINE | settings | {"model": folders[0]}
    loaded, fresh, asleep, _, awake, _, _, preserved = go_through(tmp_path, [*steps, CHECKSUMS], **engine)
    assert asleep.resident <= fresh.resident - WEIGHTS
    assert awake.result == fresh.result
    assert preserved.result == loaded.result
    assert list(tmp_path.glob("tmp*")) == []


@pytest.mark.nightly
def test_ranks_sleep_and_wake_together(folders: tuple[Path, Path], tmp_path: Path) -> None:
    by_levels = [["sleep", {"level": 1}], ["wake_up"], GENERATE, ["sleep", {"level": 2}], ["wake_up"], RELOAD, GENERATE]
    engine = ENGINE | {"model": folders[0], "tensor_parallel_size": 2}
    moments = go_through(
        tmp_path, [GENERATE, CHECKSUMS, *by_levels, CHECKSUMS], {"NPU_SIMULATOR_DEVICES": "2"}, **engine
    )
    assert [moments[index].result for index in (4, 8)] == [moments[0].result] * 2
    assert moments[9].result == moments[1].result
    assert len(moments[1].result) == 2, "a rank's checksums each"


SERVED = ("--enable-sleep-mode",)
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_demo(tmp_path_factory.mktemp("serve"), *SERVED, **DEVELOPER) as server:
        yield server


def post(server: Server, path: str) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def is_sleeping(server: Server) -> bool:
    return httpx.get(f"{server.url}/is_sleeping", trust_env=False).json()["is_sleeping"]


def resident(server: Server) -> int:
    """Return the bytes of all processes of the server that are in memory, shared ones in each."""
    total = 0
    for pid in server.processes_alive():
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return total


def ask(server: Server) -> str:
    answer = server.ask("/v1/completions", prompt="The capital of France is", temperature=0, max_tokens=16)
    return answer["choices"][0]["text"]


@pytest.mark.parametrize("level", [1, 2])
def test_over_http_a_request_in_the_night_is_answered_in_the_morning(level: int, server: Server) -> None:
    assert ask(server) == " Paris."
    assert not is_sleeping(server)
    before = resident(server)
    assert post(server, f"/sleep?level={level}") == {"status": "sleeping", "level": level}
    assert is_sleeping(server)
    if level == 2:
        assert resident(server) < before
    answers: list[str] = []
    guest = threading.Thread(target=lambda: answers.append(ask(server)))
    guest.start()
    assert not until(lambda: bool(answers), 1)
    assert post(server, "/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    if level == 2:
        body = {"method": "reload_weights"}
        assert httpx.post(f"{server.url}/collective_rpc", json=body, timeout=60, trust_env=False).status_code == 200
    assert post(server, "/wake_up?tags=kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
    guest.join(60)
    assert answers == [" Paris."]
    assert not is_sleeping(server)


def test_the_cache_alone_is_released_and_what_was_asked_goes_on(server: Server) -> None:
    post(server, "/sleep?level=0&mode=keep")
    assert post(server, "/release_kv_cache_memory") == {"status": "kv_cache_released"}
    assert is_sleeping(server)
    assert post(server, "/wake_up?tags=kv_cache")["status"] == "awake"
    assert ask(server) == " Paris."


def test_what_is_wrong_is_said_over_http(server: Server) -> None:
    assert httpx.post(f"{server.url}/sleep?level=3", trust_env=False).status_code in (400, 422)
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


@pytest.mark.parametrize("runner", [pytest.param("V1", marks=pytest.mark.nightly), "V2"])
def test_a_client_that_hangs_up_while_its_request_is_kept(runner: str, folders: tuple[Path, Path]) -> None:
    """The runner hears of it in a step that computes nothing, while memory sleeps; the others' answers go on."""
    settings = ENGINE | {"model": str(folders[0]), "skip_tokenizer_init": True, "async_scheduling": False}
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "2GiB"}
    environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    done = run_program(ABANDONED, json.dumps(settings), json.dumps(PROMPTS), str(NEW), **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, (done.returncode, done.stderr[-3000:])
    said = json.loads(line.removeprefix("SAID "))
    assert said.pop("V2") == (runner == "V2")
    assert said.keys() == {"0", "2", "3"}
    for number, tokens in said.items():
        assert_greedy(load(folders[0]), PROMPTS[int(number)], tokens)
