"""A block's next owner finds zeros in every cache that has a part of it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.utils import AttentionGroup

from npu_platform.kv_zeroing import caches_by_block

BLOCKS, HEADS, SIZE, WIDTH = 6, 2, 4, 8


def group(*names: str, stride: int = 0) -> AttentionGroup:
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32)
    made = AttentionGroup(None, list(names), spec, 0)
    made.kernel_block_stride = stride
    return made


def zero(
    groups: list[AttentionGroup], layers: dict[str, object], blocks: list[int], skipped: tuple[str, ...] = ()
) -> int:
    named = {name: SimpleNamespace(kv_cache=cache) for name, cache in layers.items()}
    views = caches_by_block(groups, named, set(skipped), BLOCKS)
    for view in views:
        view.index_fill_(0, torch.tensor(blocks), 0)
    return len(views)


def test_of_views_that_overlap_the_widest_counts() -> None:
    """Two precisions in one page: the narrow layer's view comes last and holds half of the bytes."""
    memory = torch.ones(BLOCKS, HEADS, SIZE, WIDTH)
    narrow = memory.view(torch.float16)[..., :WIDTH]
    assert zero([group("wide"), group("narrow")], {"wide": memory, "narrow": narrow}, [1, 4]) == 2
    assert not memory[[1, 4]].any()
    assert memory[[0, 2, 3, 5]].all()


def test_a_shared_cache_is_zeroed_once() -> None:
    memory = torch.ones(BLOCKS, HEADS, SIZE, WIDTH)
    assert zero([group("a", "b"), group("c")], {"a": memory, "b": memory, "c": memory[:]}, [0]) == 1
    assert not memory[0].any()


def test_kernel_blocks_smaller_than_the_managers() -> None:
    memory = torch.ones(BLOCKS * 2, HEADS, SIZE // 2, WIDTH)
    zero([group("a")], {"a": memory}, [2])
    assert not memory[4:6].any()
    assert memory[:4].all()
    assert memory[6:].all()


def test_layers_without_a_cache_of_blocks_are_left_out() -> None:
    states = AttentionGroup(None, ["mamba"], MambaSpec(SIZE, ((2, 2),), (torch.float32,)), 0)
    memory = torch.ones(BLOCKS, HEADS, SIZE, WIDTH)
    layers = {"mamba": [memory], "encoder": memory.clone(), "a": memory, "empty": torch.empty(0)}
    assert zero([states, group("encoder", "a", "empty")], layers, [0], ("encoder",)) == 1
    assert layers["encoder"].all()
    assert not memory[0].any()
