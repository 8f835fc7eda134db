"""What an engine over Ray says while it waits for devices: which of Ray's nodes have how many, and the way out."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["missing_devices", "saying_what_is_missing"]

logger = init_logger("vllm.npu_platform.ray_devices")
RESOURCE = "NPU"
PATIENCE_SECONDS = 5.0
"""For which an engine waits without a word: one that ended a moment ago still gives its devices back."""


@contextlib.contextmanager
def saying_what_is_missing(ask: Callable[[], str | None], patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Log once what `ask` returns, if after `patience` seconds, or later, it returns something."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(patience):
            if said := ask():
                logger.warning("%s", said)
                return

    threading.Thread(target=look, name="npu-ray-devices", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def missing_devices(
    nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]], needed: int
) -> str | None:
    """Return which of Ray's nodes have how many NPUs, and the way out; None where there are as many as are needed.

    `nodes` is ``ray.nodes()``, `free` what each of them has left, by its id.
    """
    alive = [node for node in nodes if node["Alive"]]
    have = {node["NodeID"]: int(node["Resources"].get(RESOURCE, 0)) for node in alive}
    left = {name: int(free.get(name, {}).get(RESOURCE, 0)) for name in have}
    if sum(left.values()) >= needed:
        return None
    each = ", ".join(
        f"{node['NodeManagerAddress']} has {have[node['NodeID']]}, {left[node['NodeID']]} free" for node in alive
    )
    return (
        f"Ray has {sum(left.values())} free of the resource {RESOURCE} and this engine needs {needed} ({each}): it "
        "waits for more. Start Ray on each node with as many as it has devices, as in "
        f"`ray start --resources='{{\"{RESOURCE}\": {needed}}}'` (`ray stop` ends one that was started without), "
        "or end what uses them."
    )
