"""What a batch has said, on the device: equal to vLLM's lists whatever happens to them between two steps."""

from __future__ import annotations

import random

import torch

from npu_platform.sampling.outputs import OutputTokens

NPU = torch.device("npu", 0)


def said(tokens: torch.Tensor) -> list[list[int]]:
    assert tokens.is_contiguous()
    assert tokens.dtype == torch.int64
    return [[token for token in row if token != -1] for row in tokens.tolist()]


def test_lists_grow_shrink_leave_and_change_places() -> None:
    """As vLLM's batch: tokens come, placeholders become tokens, requests come, leave, swap, and are computed again."""
    random.seed(0)
    followed, batch = OutputTokens(), [[1, 2], [], [3]]
    for _ in range(400):
        for output in batch:
            output[len(output) - output.count(-1) :] = []
            output.extend(random.choices(range(1000), k=random.choice([1, 1, 1, 2])))
            output.extend([-1] * random.randrange(2))
        event = random.randrange(12)
        if event == 0:
            batch.append(random.choices(range(1000), k=random.randrange(400)))
        elif event == 1 and len(batch) > 1:
            batch[random.randrange(len(batch))] = batch.pop()
        elif event == 2:
            random.shuffle(batch)
        elif event == 3:
            output = random.choice(batch)
            del output[len(output) // 2 :]
        assert said(followed.follow(batch, NPU)) == [[token for token in row if token != -1] for row in batch]


def test_a_step_copies_what_is_new() -> None:
    """The tensor stays where it is, and is narrow again when the long request has left."""
    followed, long, short = OutputTokens(), list(range(3000)), [5]
    first = followed.follow([short, long], NPU)
    for token in range(50):
        short.append(token)
        assert followed.follow([short, long], NPU).data_ptr() == first.data_ptr()
    assert followed.follow([short], NPU).shape[1] < 1000
    assert said(followed.follow([short], NPU)) == [short]


def test_nobody_has_said_anything() -> None:
    assert said(OutputTokens().follow([[], [-1]], NPU)) == [[], []]
