"""Takes an engine through steps of sleeping, waking and loading weights, in a process of its own, and measures each.

``go_through`` is for tests; the module's main is the process: ``python -m tests.support.sleeper steps.json result.json``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.vllm_process import run_module

Step = list[Any]
"""A name, "generate", "metric" or a method of ``vllm.LLM`` or of its engine, and what it takes."""


@dataclass(frozen=True)
class Moment:
    """What there was after a step: its result, the process's resident bytes, the device's free ones, whether asleep."""

    result: Any
    resident: int
    free: int
    sleeping: bool


def go_through(folder: Path, steps: list[Step], environ: dict[str, str] | None = None, **engine: Any) -> list[Moment]:
    """Run `steps` one after the other in an engine ``vllm.LLM(**engine)`` in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    scenario, result = folder / "steps.json", folder / "result.json"
    scenario.write_text(json.dumps({"engine": {**engine, "model": str(engine["model"])}, "steps": steps}))
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "4GiB"}
    done = run_module("tests.support.sleeper", scenario, result, **defaults | (environ or {}))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [Moment(**moment) for moment in json.loads(result.read_text())]


def main(scenario_file: str, result_file: str) -> None:
    """Run the steps."""
    from vllm import LLM

    scenario = json.loads(Path(scenario_file).read_text())
    llm = LLM(skip_tokenizer_init=True, **scenario["engine"])
    moments = []
    for name, *arguments in scenario["steps"]:
        owner = llm if hasattr(llm, name) else llm.llm_engine.engine_core
        own = _OWN.get(name)
        result = own(llm, *arguments) if own else _call(getattr(owner, name), *arguments)
        moments.append({"result": result, **_measured(llm)})
    llm.llm_engine.engine_core.shutdown()
    Path(result_file).write_text(json.dumps(moments, default=str))


def _generate(llm: Any, prompts: list[list[int]], new: int, lora: list[str | None] | None = None) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    requests = [LoRARequest(path, zlib.crc32(path.encode()) >> 1, path) if path else None for path in lora or ()]
    sampling = SamplingParams(temperature=0.0, max_tokens=new, detokenize=False, ignore_eos=True)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=requests or None)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _metric(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


_OWN = {"generate": _generate, "metric": _metric}


def _call(method: Any, arguments: dict[str, Any] | None = None) -> Any:
    return method(**arguments or {})


def _measured(llm: Any) -> dict[str, Any]:
    import torch

    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "free": torch.npu.mem_get_info()[0] if torch.npu.is_initialized() else 0,
        "sleeping": llm.llm_engine.is_sleeping(),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
