"""The backend of vLLM's sleep mode by itself: which tags sleep, what is kept, and what wakes up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

from npu_platform import sleep_mode
from npu_platform.sleep_mode import NPUSleepMode

MIB = 1 << 20


@pytest.fixture
def backend() -> NPUSleepMode:
    return NPUSleepMode()


def tensors(backend: NPUSleepMode) -> dict[str, torch.Tensor]:
    """Make a tensor of 4 MiB for each tag, of ones."""
    made = {}
    for tag in ("weights", "kv_cache", "runtime"):
        with backend.memory_of(tag):
            made[tag] = torch.ones(MIB, device="npu")
    return made


def kept(made: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {tag: bool(tensor.all()) for tag, tensor in made.items()}


@pytest.mark.parametrize("level", [1, 2])
def test_a_level_keeps_what_it_says(level: int, backend: NPUSleepMode) -> None:
    made = tensors(backend)
    free = torch.npu.mem_get_info()[0]
    backend.suspend(level)
    assert backend.state() == "SUSPENDED"
    assert torch.npu.mem_get_info()[0] >= free + 12 * MIB
    backend.suspend(level)  # nothing is left to do
    backend.resume()
    assert backend.state() == "RUNNING"
    assert kept(made) == {"weights": level == 1, "kv_cache": False, "runtime": True}


def test_tags_wake_one_by_one_and_what_is_not_deferrable_with_the_first(backend: NPUSleepMode) -> None:
    made = tensors(backend)
    backend.suspend(1)
    backend.resume(["kv_cache"])
    assert backend.state() == "SUSPENDED"
    assert bool(made["runtime"].all())
    made["kv_cache"].fill_(1)
    backend.resume(["weights"])
    assert backend.state() == "RUNNING"
    assert all(kept(made).values())


def test_what_finds_no_memory_to_wake_up_sleeps_on_and_says_so(backend: NPUSleepMode) -> None:
    made = tensors(backend)
    backend.suspend(1)
    total = torch.npu.mem_get_info()[1]
    torch.npu.empty_cache()
    torch.npu.set_per_process_memory_fraction((torch.npu.memory_reserved() + MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="sleeps on"):
            backend.resume()
        assert backend.state() == "SUSPENDED"
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)
    backend.resume()
    assert backend.state() == "RUNNING"
    assert kept(made) == {"weights": True, "kv_cache": False, "runtime": True}


def test_discarded_tags_stay_so_beside_a_sleep(backend: NPUSleepMode) -> None:
    made = tensors(backend)
    torch.npu.empty_cache()
    free = torch.npu.mem_get_info()[0]
    backend.discard(("kv_cache",))
    assert free + 4 * MIB <= torch.npu.mem_get_info()[0] < free + 8 * MIB
    backend.suspend(1)
    backend.resume(None)
    assert kept(made) == {"weights": True, "kv_cache": False, "runtime": True}


def test_graphs_sleep_where_asked_and_go_on(backend: NPUSleepMode, tmp_path: Path) -> None:
    backend.folder = tmp_path
    made, handle, graph = tensors(backend), torch.npu.graph_pool_handle(), torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool=handle):
        total = (made["weights"] * 2).sum()
    backend.add_graphs(handle)
    backend.suspend(1)
    backend.resume()
    graph.replay()
    assert total.item() == 2 * MIB


def test_what_loading_leaves_is_given_back(backend: NPUSleepMode) -> None:
    torch.npu.empty_cache()
    reserved = torch.npu.memory_reserved()
    with backend.memory_of("weights"):
        weight = torch.ones(MIB, device="npu")
        torch.ones(16 * MIB, device="npu")
    assert torch.npu.memory_reserved() <= reserved + 6 * MIB
    assert bool(weight.all())


def test_the_factory_of_vllm_has_it() -> None:
    sleep_mode.register()
    sleep_mode.register()
    assert SleepModeBackendFactory.get_backend_class("npu") is NPUSleepMode
    assert NPUSleepMode.is_supported()
    assert NPUSleepMode.preserves_communicators()
    assert NPUSleepMode.preserves_compiled_artifacts()
    assert NPUSleepMode.preserves_graphs_with_communicators()
