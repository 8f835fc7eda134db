"""Buffers that the host writes and kernels read: one memory, or a tensor that follows; and which a device has."""

from __future__ import annotations

import pytest
import torch

from npu_platform import capabilities
from npu_platform.v2 import buffers
from npu_platform.v2.buffers import CopiedBuffer, SharedBuffer


def test_a_shared_buffer_is_one_memory() -> None:
    held = torch.npu.memory_allocated()
    buffer = SharedBuffer((3, 2), torch.int64)
    seen = buffer.uva()
    assert (seen.device.type, seen.data_ptr(), torch.npu.memory_allocated()) == ("npu", buffer.cpu.data_ptr(), held)
    buffer.np[1:] = 5
    assert seen.tolist() == [[0, 0], [5, 5], [5, 5]]
    seen.add_(1)
    assert buffer.uva(2).tolist() == buffer.np[:2].tolist() == [[1, 1], [6, 6]]
    assert buffer.cpu.is_pinned()


def test_a_copied_buffer_follows_the_host_when_it_is_asked_for() -> None:
    buffer = CopiedBuffer((3, 2), torch.int64)
    first = buffer.uva()
    buffer.np[:] = 5
    assert first.sum() == 0
    assert buffer.uva(2).tolist() == [[5, 5], [5, 5]]
    assert first.tolist() == [[5, 5], [5, 5], [0, 0]]
    assert buffer.cpu.is_pinned()


@pytest.mark.parametrize(("reads", "kind"), [(True, SharedBuffer), (False, CopiedBuffer)])
def test_the_device_says_which(reads: bool, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    device = capabilities.Capabilities(reads_host_memory=reads)
    monkeypatch.setattr(capabilities, "of_device", lambda: device)
    assert buffers.of_device() is kind
