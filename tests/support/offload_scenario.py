"""A script for any interpreter with vLLM: generates rounds of prompts and writes what came out as JSON.

``python offload_scenario.py scenario.json result.json``; the scenario holds ``engine`` (arguments of ``vllm.LLM``),
``rounds``, ``max_tokens`` and, optionally, ``abort`` (indices of rounds whose requests are aborted after the first
step) and ``settle_seconds`` (which tiers have after a round to end what they store). A round is a list of prompts, each
a list of token ids, or an object with these as ``prompts`` and maybe ``lora`` (a folder), ``salt``, ``fault`` (of the npu
device, as ``NPU_DEBUG`` has it; the engine must be in this process) and ``reset_after`` (steps, after which the prefix
cache is reset under the running requests).
Where the engine publishes KV events (``kv_events_config`` with an endpoint ``ipc://...``), the result holds them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator


def main(scenario_file: str, result_file: str) -> None:
    """Run one scenario in an engine of its own."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    scenario = json.loads(Path(scenario_file).read_text())
    published = scenario["engine"].get("kv_events_config", {})
    events = _Events(published.get("endpoint"), published.get("replay_endpoint"))
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, **scenario["engine"])
    sampling = SamplingParams(temperature=0.0, max_tokens=scenario["max_tokens"], detokenize=False, ignore_eos=True)
    rounds = []
    for number, entry in enumerate(scenario["rounds"]):
        one = entry if isinstance(entry, dict) else {"prompts": entry}
        if "reset_after" in one:
            rounds.append(_reset(llm, sampling, **one))
        elif number in scenario.get("abort", ()):
            rounds.append(_abort(llm, one["prompts"], sampling))
        else:
            rounds.append(_generate(llm, sampling, **one))
        _settle(llm, scenario.get("settle_seconds", 60))
    result = {
        "platform": current_platform.device_type,
        "rounds": rounds,
        "events": events.all(),
        "metrics": {_name(metric): metric.value for metric in llm.get_metrics() if hasattr(metric, "value")},
    }
    llm.llm_engine.engine_core.shutdown()
    Path(result_file).write_text(json.dumps(result))


class _Events:
    """Follows an engine's KV events as a router does: it subscribes, and asks for what came before it was heard."""

    def __init__(self, endpoint: str | None, replay_endpoint: str | None) -> None:
        import zmq

        self._published = self._replay = None
        if endpoint and replay_endpoint:
            self._published = zmq.Context.instance().socket(zmq.SUB)
            self._published.setsockopt(zmq.SUBSCRIBE, b"")
            self._replay = zmq.Context.instance().socket(zmq.DEALER)
            for socket, address in ((self._published, endpoint), (self._replay, replay_endpoint)):
                socket.setsockopt(zmq.RCVTIMEO, 2000)
                socket.connect(address)

    def all(self) -> list[dict[str, Any]]:
        """Return all events there were; each has its kind, medium, tokens and number of blocks."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        found = []
        for _, batch in sorted(self._batches().items()):
            for event in decoder.decode(batch).events:
                tokens, blocks = getattr(event, "token_ids", []), len(getattr(event, "block_hashes", []))
                about = {"medium": getattr(event, "medium", None), "tokens": tokens, "blocks": blocks}
                found.append({"kind": type(event).__name__, **about})
        return found

    def _batches(self) -> dict[bytes, bytes]:
        """Return each published batch by its number."""
        import zmq

        batches: dict[bytes, bytes] = {}
        if self._published is None or self._replay is None:
            return batches
        with contextlib.suppress(zmq.Again):  # it says no more
            while True:
                _, number, batch = self._published.recv_multipart()
                batches[number] = batch
        self._replay.send_multipart((b"", bytes(8)))  # from the first one
        while (answer := self._replay.recv_multipart())[-1]:
            batches[answer[-2]] = answer[-1]
        return batches


def _generate(
    llm: Any, sampling: Any, prompts: list[list[int]], lora: str = "", salt: str = "", fault: str = ""
) -> list[dict[str, Any]]:
    """Return the tokens of each prompt, and how many of its own were cached."""
    from vllm.lora.request import LoRARequest

    salted = {"cache_salt": salt} if salt else {}
    adapter = LoRARequest(lora, zlib.crc32(lora.encode()) >> 1, lora) if lora else None
    with _armed(fault):
        outputs = llm.generate(
            [{"prompt_token_ids": ids, **salted} for ids in prompts], sampling, use_tqdm=False, lora_request=adapter
        )
    return [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs]


@contextlib.contextmanager
def _armed(fault: str) -> Iterator[None]:
    """Arm a fault of the device while the first load is submitted; it must strike."""
    if not fault:
        yield
        return
    import torch

    from npu_kvconnector.worker import HostTierWorker

    load, struck = HostTierWorker.submit_load, []

    def submit_load(worker: HostTierWorker, *arguments: Any, **more: Any) -> bool:
        if struck:
            return load(worker, *arguments, **more)
        with torch.npu.faults.Fault(fault) as armed:  # a runner has copies of its own before and after it
            submitted = load(worker, *arguments, **more)
        struck.append(armed.struck)
        return submitted

    with mock.patch.object(HostTierWorker, "submit_load", submit_load):
        yield
    assert any(struck), fault


def _settle(llm: Any, seconds: float) -> None:
    """Let the tiers end what they store, however busy the disk is; an engine process of its own does so by itself."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    end = time.monotonic() + seconds
    while core is not None and core.scheduler.has_requests() and time.monotonic() < end:
        llm.llm_engine.step()


def _name(metric: Any) -> str:
    """Return a metric's name, with the tier it is of."""
    return f"{metric.name}[{metric.labels['tier']}]" if "tier" in metric.labels else str(metric.name)


def _abort(llm: Any, prompts: list[list[int]], sampling: Any) -> list[dict[str, Any]]:
    """Start requests and give them up while they run."""
    engine = llm.llm_engine
    names = [f"abort-{index}" for index in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    engine.step()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return []


def _reset(llm: Any, sampling: Any, prompts: list[list[int]], reset_after: int) -> list[dict[str, Any]]:
    """Return the tokens of requests under which the prefix cache was reset, in the order of their prompts."""
    engine = llm.llm_engine
    names = [f"reset-{index}" for index in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    for _ in range(reset_after):
        engine.step()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    return [{"tokens": list(found[name].outputs[0].token_ids)} for name in names]


if __name__ == "__main__":
    main(*sys.argv[1:])
