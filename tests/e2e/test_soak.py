"""Mixed load leaves a server as it was: every answer is that of a quiet server, and nothing grows.

Prompts of all lengths, seeds, penalties, grammars, adapters, images, clients that hang up, requests that are thrown out of
too small a cache, sleep and wake. CI runs it for 30 seconds, `nox -s soak` for two minutes, `nox -s soak -- 3600` for an hour,
as every night does; of two minutes and more the last sixth watches the device's memory.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import httpx
import pytest
import transformers

from tests.support import multimodal, vital_signs
from tests.support.adapters import adapter
from tests.support.environments import ROOT
from tests.support.server import metric, serve, until
from tests.support.traffic import CHAT_TEMPLATE, Traffic
from tests.support.vital_signs import Signs

if TYPE_CHECKING:
    from pathlib import Path

    from npu_platform.demo.server import Server

SECONDS = float(os.environ.get("NPU_SOAK_SECONDS", "30"))
LONG = 120.0  # of load, from which on the last sixth watches memory
ADAPTERS = {"one": ["q_proj", "v_proj"], "other": ["k_proj", "o_proj"]}
ARGUMENTS = (
    *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-batched-tokens", "256", "--max-num-seqs", "8"),
    *("--num-gpu-blocks-override", "40", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"),
    *("--enable-sleep-mode", "--chat-template", CHAT_TEMPLATE, "--cudagraph-capture-sizes", "1", "4", "8"),
    *("--worker-extension-cls", "tests.support.vital_signs.DeviceBytes"),
)
ENVIRON = {
    "VLLM_BATCH_INVARIANT": "1",  # so that a replay has no other bits
    "VLLM_SERVER_DEV_MODE": "1",
    "PYTHONPATH": str(ROOT),
}
SLEEP_EVERY = 30.0  # seconds; in a short run it sleeps once in each of its two parts
GROWTH = 48 << 20  # bytes by which a server's processes may grow, by the slope of their sum, once caches are full
DEVICE_GROWTH = 1 << 20
KINDS = ("/v1/completions", "/v1/chat/completions", "structured", "adapters", "left", "refused", "slept")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = multimodal.tiny_qwen2_5_vl(tmp_path_factory.mktemp("soak") / "model")
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    for seed, (name, layers) in enumerate(ADAPTERS.items(), 1):
        adapter(folder.parent / name, loaded, layers, 8, seed=seed)
    return folder


@pytest.mark.timeout(3 * SECONDS + 600)
def test_load_changes_no_answer_and_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    watched = SECONDS / 6 if SECONDS >= LONG else 0
    soak(model, tmp_path / "fast", SECONDS - watched)
    if watched:
        soak(model, tmp_path / "watched", watched, NPU_DEBUG="memory")


def soak(model: Path, folder: Path, seconds: float, **environ: str) -> None:
    """Serve, load the server for so long, replay, and look at what is left."""
    folder.mkdir()
    adapters = [f"{name}={model.parent / name}" for name in ADAPTERS]
    with serve(model, folder, *ARGUMENTS, "--lora-modules", *adapters, **ENVIRON | environ) as server:
        traffic = Traffic(server, tuple(ADAPTERS))
        watch(traffic, seconds / 4)  # until caches are full
        held = settled(server)
        signs = watch(traffic, seconds * 3 / 4)
        assert settled(server) - held <= DEVICE_GROWTH
        crowded = metric(server, "vllm:num_preemptions_total")
        wrong = traffic.replay()
        print(dict(traffic.counts), f"{len(traffic.kept)} replayed")
        assert not wrong, f"{len(wrong)} of {len(traffic.kept)} differ:\n" + "\n".join(wrong[:3])
        if seconds >= LONG / 6:
            assert_level(signs)
        if not environ:  # watched memory is slow, so that not all happens
            assert crowded > 0
            assert min(traffic.counts[kind] for kind in KINDS) > 0, traffic.counts
        held_in_memory = vital_signs.shared_memory(server)
        assert server.stop()
    assert not [path for path in held_in_memory if path.exists()]


def watch(traffic: Traffic, seconds: float) -> list[Signs]:
    """Load the server for so long, let it sleep now and then, and return its signs."""
    every, found = min(SLEEP_EVERY, seconds / 2), list[Signs]()

    def look(end: float) -> None:
        tired = time.monotonic() + every
        while time.monotonic() < end:
            found.append(vital_signs.take(traffic.server))
            if time.monotonic() > tired:
                sleep(traffic)
                tired += every
            time.sleep(seconds / 100)

    traffic.run(seconds, look)
    return found


def sleep(traffic: Traffic) -> None:
    """Send the server to sleep, with its requests ended first, given up, or left to go on afterwards; and wake it."""
    mode = ("wait", "abort", "keep")[traffic.counts["slept"] % 3]
    for path in (f"/sleep?level=1&mode={mode}", "/wake_up"):
        answer = httpx.post(f"{traffic.server.url}{path}", timeout=120, trust_env=False)
        assert answer.status_code == httpx.codes.OK, answer.text
    traffic.counts["slept"] += 1


def settled(server: Server) -> int:
    """Wait until nothing runs; assert that no request is left, and return the bytes that tensors hold of the device."""
    assert until(lambda: metric(server, "vllm:num_requests_running") == 0)
    assert metric(server, "vllm:num_requests_waiting") == 0
    assert until(lambda: metric(server, "vllm:kv_cache_usage_perc") == 0)
    return vital_signs.device_bytes(server)


def assert_level(signs: list[Signs]) -> None:
    """Assert that memory, files and threads stay as they are."""
    early, late = signs[: len(signs) // 2], signs[len(signs) // 2 :]
    growth = vital_signs.slope(signs) * (signs[-1].time - signs[0].time)
    print(f"resident: {signs[0].resident >> 20} to {signs[-1].resident >> 20} MiB, by its slope {growth / 2**20:+.1f}")
    assert growth < GROWTH
    assert min(sign.files for sign in late) <= max(sign.files for sign in early)
    assert min(sign.threads for sign in late) <= max(sign.threads for sign in early)
