"""The agent of NIXL whose progress thread sleeps, beside NIXL's own."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
import torch

from npu_kvconnector.compat import sleeping_agent

api = pytest.importorskip("nixl._api")
SECONDS = 1.0


def new_agent() -> Any:
    """Return one as vLLM makes it."""
    return api.nixl_agent(str(uuid.uuid4()), api.nixl_agent_config(num_threads=4, capture_telemetry=True))


def share_of_a_core() -> float:
    begin, used = time.monotonic(), time.process_time()
    time.sleep(SECONDS)
    return (time.process_time() - used) / (time.monotonic() - begin)


def read(reader: Any, writer: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy bytes from one agent's memory to another's."""
    descriptions = [agent.register_memory(memory) for agent, memory in ((writer, source), (reader, target))]
    name = reader.add_remote_agent(writer.get_agent_metadata())
    handle = reader.initialize_xfer("READ", descriptions[1].trim(), descriptions[0].trim(), name, b"done")
    state, until = reader.transfer(handle), time.monotonic() + 20
    while state not in ("DONE", "ERR") and time.monotonic() < until:
        state = reader.check_xfer_state(handle)
    assert state == "DONE"
    reader.release_xfer_handle(handle)
    for agent, description in zip((writer, reader), descriptions, strict=True):
        agent.deregister_memory(description)


def test_the_thread_sleeps_and_blocks_arrive() -> None:
    others = share_of_a_core()  # what other tests may have left in this process
    own = new_agent()
    awake = share_of_a_core() - others
    assert awake > 0.3, "NIXL's own thread sleeps now: sleeping_agent is no longer needed"
    del own
    reader, writer = sleeping_agent(new_agent(), 4), sleeping_agent(new_agent(), 4)
    assert share_of_a_core() - others < awake / 2
    assert reader.backend_options["UCX"]["num_threads"] == "4"
    source = torch.arange(1 << 16, dtype=torch.int32)
    target = torch.zeros_like(source)
    read(reader, writer, source, target)
    assert torch.equal(source, target)
