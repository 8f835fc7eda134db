"""A script for any interpreter with vLLM: generates rounds of prompts and writes what came out as JSON.

``python offload_scenario.py scenario.json result.json``; the scenario holds ``engine`` (arguments of ``vllm.LLM``),
``rounds``, ``max_tokens`` and, optionally, ``abort`` (indices of rounds whose requests are aborted after the first
step). A round is a list of prompts, each a list of token ids, or an object with these as ``prompts`` and maybe ``lora``
(a folder), ``salt`` and ``fault`` (of the npu device, as ``NPU_DEBUG`` has it; the engine must be in this process).
Where the engine publishes KV events (``kv_events_config`` with an endpoint ``ipc://...``), the result holds them.
"""

from __future__ import annotations

import contextlib
import json
import sys
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
    events = _Events(scenario["engine"].get("kv_events_config", {}).get("endpoint"))
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, **scenario["engine"])
    sampling = SamplingParams(temperature=0.0, max_tokens=scenario["max_tokens"], detokenize=False, ignore_eos=True)
    rounds = []
    for number, entry in enumerate(scenario["rounds"]):
        one = entry if isinstance(entry, dict) else {"prompts": entry}
        if number in scenario.get("abort", ()):
            rounds.append(_abort(llm, one["prompts"], sampling))
        else:
            rounds.append(_generate(llm, sampling, **one))
    result = {
        "platform": current_platform.device_type,
        "rounds": rounds,
        "events": events.all(),
        "metrics": {_name(metric): metric.value for metric in llm.get_metrics() if hasattr(metric, "value")},
    }
    llm.llm_engine.engine_core.shutdown()
    Path(result_file).write_text(json.dumps(result))


class _Events:
    """Follows an engine's KV events as a router does, from before it starts."""

    def __init__(self, endpoint: str | None) -> None:
        import zmq

        self._socket = None
        if endpoint:
            self._socket = zmq.Context.instance().socket(zmq.SUB)
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._socket.setsockopt(zmq.RCVTIMEO, 2000)
            self._socket.connect(endpoint)

    def all(self) -> list[dict[str, Any]]:
        """Return all events there were; each has its kind, medium, tokens and number of blocks."""
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        found = []
        with contextlib.suppress(zmq.Again):
            while self._socket is not None:
                for event in decoder.decode(self._socket.recv_multipart()[-1]).events:
                    tokens, blocks = getattr(event, "token_ids", []), len(getattr(event, "block_hashes", []))
                    about = {"medium": getattr(event, "medium", None), "tokens": tokens, "blocks": blocks}
                    found.append({"kind": type(event).__name__, **about})
        return found


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


if __name__ == "__main__":
    main(*sys.argv[1:])
