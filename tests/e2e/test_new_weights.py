"""Weights that reach an engine after its start: from a trainer over npu collectives, from a sharded checkpoint."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

from npu_platform.weight_transfer import NPUTrainerInitInfo
from tests.support import models
from tests.support.server import serve
from tests.support.sleeper import go_through
from tests.support.stores import free_port
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server

NEW = 8
PROMPTS = models.prompt_token_ids([3, 40, 17])
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [1, 4],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return models.tiny_qwen3(folder / "served"), models.tiny_qwen3(folder / "trained", seed=3)


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items() if isinstance(value, int | str)]
    options += ["--cudagraph-capture-sizes", "1", "4", "--skip-tokenizer-init", "--enable-scale-out"]
    transfer = ("--weight-transfer-config", '{"backend": "npuccl"}')
    environ = {"VLLM_SERVER_DEV_MODE": "1", "NPU_SIMULATOR_MEMORY": "2GiB"}
    with serve(folders[0], tmp_path_factory.mktemp("log"), *options, *transfer, **environ) as server:
        yield server


def assert_serves(server: Server, model: Path) -> None:
    """Assert that the server's greedy tokens are those of a model."""
    for prompt in PROMPTS:
        answer = server.ask(
            "/inference/v1/generate",
            token_ids=prompt,
            sampling_params={"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False},
        )
        assert_greedy(load(model), prompt, answer["choices"][0]["token_ids"])


@pytest.mark.parametrize(("packed", "device"), [(True, "cpu"), (False, "npu")])
def test_a_trainer_sends_its_weights(packed: bool, device: str, server: Server, folders: tuple[Path, Path]) -> None:
    served, trained = folders
    info = NPUTrainerInitInfo(
        master_address="127.0.0.1",
        master_port=free_port(),
        world_size=2,
        rank=0,
        packed=packed,
        packed_buffer_size_bytes=1 << 20,
    )
    client = HTTPVLLMWeightSyncClient(server.url, timeout=60)
    module = copy.deepcopy(load(trained)).to(device)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(module))
    assert_serves(server, served)
    trainer.send_weights()
    server.ask("/reset_prefix_cache")
    assert_serves(server, trained)
    with torch.no_grad():
        for old, new in zip(module.parameters(), load(served).parameters(), strict=True):
            old.copy_(new)
    trainer.send_weights()
    server.ask("/reset_prefix_cache")
    assert_serves(server, served)
    trainer.shutdown()
    client.shutdown_weight_transfer_engine()


def test_a_sharded_checkpoint_gives_the_same_tokens(folders: tuple[Path, Path], tmp_path: Path) -> None:
    saved = tmp_path / "sharded"
    save = {"method": "save_sharded_state", "kwargs": {"path": str(saved), "pattern": None, "max_size": 1 << 20}}
    generate = ["generate", PROMPTS, NEW]
    saved.mkdir()
    first, _ = go_through(tmp_path, [generate, ["collective_rpc", save]], model=folders[0], **ENGINE)
    assert len(list(saved.glob("*.safetensors"))) > 1
    for file in folders[0].glob("*.json"):
        (saved / file.name).write_text(file.read_text())
    (again,) = go_through(tmp_path / "again", [generate], model=saved, load_format="sharded_state", **ENGINE)
    assert again.result == first.result
