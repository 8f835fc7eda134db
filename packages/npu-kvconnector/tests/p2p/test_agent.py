"""The agent of NIXL whose progress thread sleeps, beside NIXL's own."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from npu_kvconnector.compat import sleeping_agent

if TYPE_CHECKING:
    from collections.abc import Iterable

api = pytest.importorskip("nixl._api")


def new_agent() -> Any:
    """Return one as vLLM makes it."""
    return api.nixl_agent(str(uuid.uuid4()), api.nixl_agent_config(num_threads=4, capture_telemetry=True))


def threads() -> dict[str, tuple[int, int]]:
    """Return how long each thread of this process has run, in ns, and how often it has slept."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            slept = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)
            assert slept
            found[task.name] = int((task / "schedstat").read_text().split()[0]), int(slept[1])
    return found


def restless(before: Iterable[str]) -> list[str]:
    """Return the threads made since that run and do not sleep, however many others want the cores."""
    first = threads()
    time.sleep(1)
    last = threads()
    made = last.keys() & first.keys() - set(before)
    return [one for one in made if last[one][0] > first[one][0] and last[one][1] == first[one][1]]


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
    before = threads()
    own = new_agent()
    assert restless(before), "NIXL's own thread sleeps now: sleeping_agent is no longer needed"
    del own
    reader, writer = sleeping_agent(new_agent(), 4), sleeping_agent(new_agent(), 4)
    assert not restless(before)
    assert reader.backend_options["UCX"]["num_threads"] == "4"
    source = torch.arange(1 << 16, dtype=torch.int32)
    target = torch.zeros_like(source)
    read(reader, writer, source, target)
    assert torch.equal(source, target)
