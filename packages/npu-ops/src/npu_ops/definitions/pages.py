"""Moving pages of the KV cache between a device's memory and the host's."""

from __future__ import annotations

import itertools

from torch import Tensor

from npu_ops.op import define

SHAPE = 8
"""Numbers that say what a stack is."""


@define(
    "copy_pages(Tensor(a!)[] device, Tensor(b!) host, int[] shapes, Tensor pairs, Tensor(c!) progress, bool to_host, "
    "float seconds) -> ()"
)
def copy_pages(
    device: list[Tensor],
    host: Tensor,
    shapes: list[int],
    pairs: Tensor,
    progress: Tensor,
    to_host: bool,
    seconds: float,
) -> None:
    """Copy blocks of stacks, layers at equal distances, between the device and the host; go on where a call ended.

    device: the memory of each stack, all int8 in a row; host: likewise, of the CPU. shapes: for each stack the number
    of its layers and the bytes between two on the device and on the host, the same of the fragments of a page, the
    bytes of a fragment, and how many pairs are its own. pairs: int64 [pairs, 2], stack after stack: where a block of
    the first layer begins on either side. progress: int64 [1], how many fragments of all are done, in the order of
    pairs, layers and fragments; it is 0 at first, and copying begins there. seconds: no fragments are begun after
    them, but some at the start; the reference copies all.
    """
    done, first, at = int(progress), 0, 0
    for number, memory in enumerate(device):
        layers, layer_device, layer_host, fragments, fragment_device, fragment_host, size, count = shapes[
            SHAPE * number : SHAPE * (number + 1)
        ]
        for begin, other in pairs[at : at + count].tolist():
            for layer, fragment in itertools.product(range(layers), range(fragments)):
                if first >= done:
                    here = memory.narrow(0, begin + layer * layer_device + fragment * fragment_device, size)
                    there = host.narrow(0, other + layer * layer_host + fragment * fragment_host, size)
                    (there if to_host else here).copy_(here if to_host else there)
                first += 1
        at += count
    progress.fill_(first)
