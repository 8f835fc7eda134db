"""Runs prompts through data-parallel replicas of an engine, as vLLM runs them for servers and for offline batches.

``run_replicas`` is for tests; the module's main is the process: ``python -m tests.support.replicas_run scenario.json result.json``.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.engine_run import adapter_request
from tests.support.vllm_process import run_module

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class ReplicasRun:
    """What the replicas said: the token ids of each prompt, and what they wrote."""

    tokens: list[list[int]]
    log: str

    def devices(self) -> set[str]:
        """Return the devices that the workers took, by what they say of themselves."""
        return set(re.findall(r"npu worker: device=(npu:\d+)", self.log))


def run_replicas(
    folder: Path,
    model: Path,
    prompts: list[list[int]],
    *,
    offline: bool,
    new: int,
    replicas: int = 2,
    devices: int | None = None,
    lora: list[str | None] | None = None,
    environ: dict[str, str] | None = None,
    **engine: Any,
) -> ReplicasRun:
    """Answer `prompts` in turn by the `replicas`, on `devices` software NPUs in all, greedily with `new` tokens.

    `offline`: a ``vllm.LLM`` in a process each, as in vLLM's example; otherwise one asynchronous engine, which servers
    use, starts all of them. `lora`: the folder of each prompt's adapter, not offline.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scenario, result = folder / "scenario.json", folder / "result.json"
    engine = {"model": str(model), "skip_tokenizer_init": True, **engine}
    said = {"offline": offline, "engine": engine, "replicas": replicas, "prompts": prompts, "new": new}
    said |= {} if lora is None else {"lora": lora}
    scenario.write_text(json.dumps(said))
    defaults = {
        "NPU_SIMULATOR_DEVICES": str(devices or replicas),
        "NPU_SIMULATOR_MEMORY": "2GiB",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    done = run_module("tests.support.replicas_run", scenario, result, **defaults | (environ or {}))
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    return ReplicasRun(json.loads(result.read_text()), log)


def main(scenario_file: str, result_file: str) -> None:
    """Run the scenario."""
    scenario = json.loads(Path(scenario_file).read_text())
    run = _offline if scenario.pop("offline") else _serve
    Path(result_file).write_text(json.dumps(run(**scenario)))


def _sampling(new: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)


def _serve(
    engine: dict[str, Any],
    replicas: int,
    prompts: list[list[int]],
    new: int,
    lora: list[str | None] | None = None,
) -> list[list[int]]:
    return answered(engine | {"data_parallel_size": replicas}, prompts, new, lora, replicas=replicas)


def answered(
    engine: dict[str, Any],
    prompts: list[list[int]],
    new: int,
    lora: list[str | None] | None = None,
    *,
    replicas: int = 1,
    before_the_end: Callable[[], Any] = lambda: None,
) -> list[list[int]]:
    """Return what an asynchronous engine says to all prompts at once, each of which goes to the next of its `replicas`.

    1: they go where its balancer sends them.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def answer(llm: AsyncLLM, number: int) -> list[int]:
        prompt, adapter = {"prompt_token_ids": prompts[number]}, lora[number] if lora else None
        options: dict[str, Any] = {"lora_request": adapter_request(adapter)}
        if replicas > 1:
            options["data_parallel_rank"] = number % replicas
        async for output in llm.generate(prompt, _sampling(new), f"request-{number}", **options):
            last = output
        return list(last.outputs[0].token_ids)

    async def answer_all() -> list[list[int]]:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine))
        try:
            said = await asyncio.gather(*(answer(llm, number) for number in range(len(prompts))))
            await asyncio.to_thread(before_the_end)
            return said
        finally:
            llm.shutdown()

    return asyncio.run(answer_all())


def _offline(engine: dict[str, Any], replicas: int, prompts: list[list[int]], new: int) -> list[list[int]]:
    from vllm.utils.network_utils import get_open_port

    context, port = multiprocessing.get_context("fork"), get_open_port()
    answers: Any = context.Queue()
    ranks = [
        context.Process(target=_replica, args=(rank, replicas, port, engine, prompts[rank::replicas], new, answers))
        for rank in range(replicas)
    ]
    for rank in ranks:
        rank.start()
    said = dict(answers.get(timeout=300) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * replicas
    return [said[number % replicas][number // replicas] for number in range(len(prompts))]


def _replica(
    rank: int, replicas: int, port: int, engine: dict[str, Any], prompts: list[list[int]], new: int, answers: Any
) -> None:
    from vllm import LLM

    os.environ |= {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_SIZE": str(replicas),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
    llm = LLM(**engine)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], _sampling(new), use_tqdm=False)
    answers.put((rank, [list(output.outputs[0].token_ids) for output in outputs]))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
