"""HungDisk: the durable tier on a disk that stops answering, for engines that must not mind.

``{"type": "HungDisk", "module_path": "tests.support.hung_disk", "path": ..., "bytes": ..., "writes": 3}``: after so many
writes none comes back, nor does any read.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from npu_kvconnector.tiers.durable.manager import DurableTierManager

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from vllm.v1.kv_offload.base import OffloadingSpec


class HungDisk(DurableTierManager):
    """Hangs where a call of the system would: in the tier's threads, with the lock of who writes."""

    silent_seconds = 2.0

    def _start(self, spec: OffloadingSpec, memory: memoryview, options: Mapping[str, Any]) -> None:
        self.writes = options["writes"]
        super()._start(spec, memory, {name: option for name, option in options.items() if name != "writes"})

    def _put(self, store: Any, blocks: Any, came: float) -> bool:
        self.writes -= 1
        if self.writes >= 0:
            return super()._put(store, blocks, came)
        with store._writing:
            threading.Event().wait()
        raise AssertionError

    def _read(self, name: bytes, target: np.ndarray) -> bool:
        if self.writes < 0:
            threading.Event().wait()
        return super()._read(name, target)
