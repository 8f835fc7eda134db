"""What vLLM 0.32 has no seam for; each function names the versions, the reason and its test."""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import queue
    from collections.abc import Callable

    from vllm.config import KVTransferConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

__all__ = ["engine_bell", "hear_of_adapters", "recompute_failed_loads", "salt_blocks", "sleeping_agent"]

_PROGRESS_SECONDS = 0.001
"""What comes wakes the thread at once; this is for transports of UCX that do not say that something came."""


def engine_bell() -> Callable[[], None]:
    """Return what lets the engine that is being made take a step: without work it waits for a client's request.

    vLLM 0.32 and 0.33: a tier can ask for steps (``has_pending_work``) but not wake an engine that sleeps on its queue,
    so that vLLM's own p2p tier has the engine take steps forever. vLLM tells a tier nothing of its engine, which makes
    its scheduler, and that its tiers, while it is itself made: so it is found among the callers and woken as vLLM does.
    An engine in the program's own process has no such queue; it takes steps only while the program has it generate, and
    nothing is done here. vLLM 0.33 can also poll a tier from a thread (``tolerates_off_thread_polling``), many times a
    second and for ever, and what a tier behind brings then still waits for a step. Test: test_tcp_probe.py.
    """
    core: Any = sys.modules.get("vllm.v1.engine.core")
    engine = _engine_that_is_made()
    if engine is None or not isinstance(engine, core.EngineCoreProc):
        return lambda: None
    requests: queue.Queue[Any] = engine.input_queue
    return lambda: requests.put_nowait((core.EngineCoreRequestType.WAKEUP, None))


def hear_of_adapters(before_loading: Callable[[LoRARequest], None], before_removing: Callable[[int], None]) -> None:
    """Be told which adapters the engine that is being made is asked to load and to remove, before it does.

    vLLM 0.32 and 0.33: a server loads an adapter into the workers before any request names it, and says nothing of it
    to the scheduler or to a connector. Who is to know with which weights that was done must look at the files then.
    Scope: two methods of this one engine, which go on as before. Test: test_adapters.py.
    """
    engine = _engine_that_is_made()
    if engine is None:
        return
    kind, itself = type(engine), weakref.ref(engine)  # no cycle, which would keep an engine's memory

    def add_lora(lora_request: LoRARequest) -> bool:
        before_loading(lora_request)
        return bool(kind.add_lora(itself(), lora_request))

    def remove_lora(lora_id: int) -> bool:
        before_removing(lora_id)
        return bool(kind.remove_lora(itself(), lora_id))

    for method in (add_lora, remove_lora):  # by whose annotations vLLM reads what comes from a client
        vars(method)["__signature__"] = inspect.signature(getattr(engine, method.__name__))
    engine.add_lora, engine.remove_lora = add_lora, remove_lora


def recompute_failed_loads(transfer: KVTransferConfig) -> None:
    """Set ``kv_load_failure_policy`` to "recompute" in the scheduler's own configuration.

    vLLM 0.32 and 0.33: the policy is the user's and by default "fail", which answers the client with an error. Here a
    load is an attempt to save work and never the only copy, so that there is no use for "fail". The scheduler reads the
    policy after it has made the connector, which has no other way to say so. Test: test_connector.py.
    """
    transfer.kv_load_failure_policy = "recompute"


def salt_blocks(request: Request, salt: str) -> None:
    """Name the blocks of a request that has just come by ``salt`` as well, on the device and in all tiers.

    vLLM 0.32 and 0.33: a block's name knows the tokens, the adapter's name and path and the user's salt. Who knows more
    of what decides a block's bytes has no way to say so but the salt, and a connector meets requests when their blocks
    have names. On the device they must have the new ones too: what is found there is handed on to the tiers. Test:
    test_adapters.py.
    """
    request.cache_salt = f"{request.cache_salt or ''}\n{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()


def sleeping_agent(agent: Any, threads: int) -> Any:
    """Return a NIXL agent with the name and the backends of a new one, whose progress thread sleeps.

    NIXL 1.4 and 1.5: the Python class sets the time that the thread sleeps (`pthrDelay`) to zero and takes no other, so
    that in each process that has an agent a thread takes a whole core for ever; with two cores, half of the machine.
    Here it sleeps until something comes, and takes 4 % of a core. Scope: nothing is replaced. Test: test_agent.py.

    Args:
        agent: of ``nixl_agent``, that nobody has used.
        threads: of a backend that may have several; 0 for its own choice.
    """
    bindings = sys.modules[type(agent.agent).__module__]
    settings = bindings.nixlAgentConfig()
    settings.useProgThread = True
    settings.pthrDelay = int(_PROGRESS_SECONDS * 1e6)
    settings.captureTelemetry = True  # as vLLM asks for
    backends = list(agent.backends)
    agent.backends.clear()
    agent.agent = bindings.nixlAgent(agent.name, settings)
    for backend in backends:
        agent.create_backend(backend, {"num_threads": str(threads)} if threads else {})
    return agent


def _engine_that_is_made() -> Any | None:
    """Return the engine among the callers whose constructor runs, if there is one."""
    core: Any = sys.modules.get("vllm.v1.engine.core")
    frame = inspect.currentframe()
    while core is not None and frame is not None:
        maker = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(maker, core.EngineCore):
            return maker
        frame = frame.f_back
    return None
