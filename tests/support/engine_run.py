"""Runs rounds of prompts through vLLM engines in a process of their own, and brings back what came out.

``run_engine``, ``run_engines`` and ``run_scenarios`` are for tests; the module's main is the process:
``python -m tests.support.engine_run scenarios.json result.json``.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
import weakref
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.vllm_process import run_module


@dataclass(frozen=True)
class EngineRun:
    """What an engine said: per round, per prompt, ``tokens``, ``cached`` prompt tokens, and if asked the chosen tokens'
    ``logprobs``, each step's ``best``, and all that are ``known`` of a step, by token.

    `runner` is V1 or V2; `layers` is what ran, as ``npu_platform.implementations`` names it; `log` is of all engines of the process.
    """

    rounds: list[list[dict[str, Any]]]
    metrics: dict[str, float]
    graphs_captured: int
    platform: str
    runner: str
    layers: list[dict[str, Any]]
    log: str

    def tokens(self, number: int) -> list[list[int]]:
        """Return the token ids of one round."""
        return [output["tokens"] for output in self.rounds[number]]

    def implementations(self, layer: str = "") -> set[str]:
        """Return what the layers run whose class has `layer` in its name."""
        return {kind["implementation"] for kind in self.layers if layer in kind["layer"]}


def run_engine(
    folder: Path, model: Path, rounds: list[dict[str, Any]], environ: dict[str, str] | None = None, **engine: Any
) -> EngineRun:
    """Run `rounds` (each ``{"prompts": [[id]], "sampling": {...}}``, one sampling for all or a list, and maybe the
    folder of each prompt's adapter in ``"lora"``, its cache's salt in ``"salts"``) with ``vllm.LLM(model=..., **engine)``.

    A round ``{"calls": [[name, arguments]]}`` calls methods of ``vllm.LLM`` instead, such as ``["sleep", {"level": 1}]``;
    a round ``{"link": [name, folder]}`` makes a name that of another folder.
    ``"seen"``, ``"watched"`` and ``"heard"`` are the numbers of each prompt's image, video or recording
    (``tests.support.multimodal``).
    With ``runner="pooling"`` a round has no sampling, and its outputs are each ``{"embedding": [float]}``, or with
    ``"task": "classify"`` ``{"probs": [float]}``. With a ``profiler_config`` the rounds are profiled.
    """
    return run_engines(folder, [model], rounds, environ, **engine)[0]


def run_engines(
    folder: Path, models: list[Path], rounds: list[dict[str, Any]], environ: dict[str, str] | None = None, **engine: Any
) -> list[EngineRun]:
    """Run the same rounds with one model after the other, in one process; otherwise as ``run_engine``."""
    scenarios = [{"engine": {"model": str(model), **engine}, "rounds": rounds} for model in models]
    return run_scenarios(folder, scenarios, environ)


def run_scenarios(
    folder: Path, scenarios: list[dict[str, Any]], environ: dict[str, str] | None = None
) -> list[EngineRun]:
    """Run engines of different settings and rounds (``{"engine": {"model": ...}, "rounds": [...]}``) in one process."""
    folder.mkdir(parents=True, exist_ok=True)
    scenario, result = folder / "scenarios.json", folder / "result.json"
    scenario.write_text(json.dumps(scenarios))
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "4GiB"}
    done = run_module("tests.support.engine_run", scenario, result, **defaults | (environ or {}))
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    return [EngineRun(**run, log=log) for run in json.loads(result.read_text())]


def main(scenario_file: str, result_file: str) -> None:
    """Run the scenarios."""
    results = [run_scenario(scenario) for scenario in json.loads(Path(scenario_file).read_text())]
    Path(result_file).write_text(json.dumps(results))


def run_scenario(scenario: dict[str, Any]) -> dict[str, Any]:
    """Run one scenario in this process; returns the fields of :class:`EngineRun` but the log."""
    from vllm import LLM
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.platforms import current_platform

    look_at(Path(scenario["engine"]["model"]))
    keep_out_of_collections()
    earlier = weakref.WeakSet(CUDAGraphWrapper._all_instances)
    by_v2_before = compilation_counter.num_cudagraph_captured  # which the V2 runner alone counts here
    pooling = scenario["engine"].get("runner") == "pooling"
    llm = LLM(**{"skip_tokenizer_init": not pooling, "disable_log_stats": False} | scenario["engine"])
    profiled = "profiler_config" in scenario["engine"]
    if profiled:
        llm.start_profile()
    rounds = [_round(llm, pooling, one) for one in scenario["rounds"]]
    if profiled:
        llm.stop_profile()
    result = {
        "rounds": rounds,
        "metrics": _metrics(llm),
        "graphs_captured": sum(
            len(wrapper.concrete_cudagraph_entries)
            for wrapper in CUDAGraphWrapper._all_instances
            if wrapper not in earlier
        )
        + compilation_counter.num_cudagraph_captured
        - by_v2_before,
        "platform": current_platform.device_type,
        "runner": "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1",
        "layers": [asdict(kind) for kind in llm.collective_rpc("layer_implementations")[0]],
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def keep_out_of_collections() -> None:
    """Take away what the last engine left, and keep the imports out of this collection and all later ones.

    An engine collects twenty times while it starts and ends. vLLM freezes what is there, its engine too, and thaws all
    of it when it ends, so that each look went through all that was imported, for half a second or a whole one.
    """
    gc.freeze = gc.unfreeze = lambda: None
    gc.collect()
    _freeze_once()


_freeze_once = functools.cache(gc.freeze)


def _metrics(llm: Any) -> dict[str, float]:
    """Return the metrics by name; one of several numbers as name[0], name[1] and so on."""
    found = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            found[metric.name] = metric.value
        elif hasattr(metric, "values"):
            found |= {f"{metric.name}[{place}]": value for place, value in enumerate(metric.values)}
    return found


def look_at(model: Path) -> None:
    """Register the model's class where vLLM knows only its name: it would import itself in yet another process to look."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _LazyRegisteredModel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for name in json.loads((model / "config.json").read_text())["architectures"]:
        known = ModelRegistry.models.get(name)
        if isinstance(known, _LazyRegisteredModel):
            ModelRegistry.register_model(name, known.load_model_cls())


def _round(llm: Any, pooling: bool, one: dict[str, Any]) -> list[dict[str, Any]]:
    if "link" in one:
        name, target = map(Path, one["link"])
        name.unlink(missing_ok=True)
        name.symlink_to(target)
        return []
    if "calls" not in one:
        return (_pool if pooling else _generate)(llm, **one)
    settle(llm)
    for name, arguments in one["calls"]:
        getattr(llm, name)(**arguments)
    return []


def settle(llm: Any) -> None:
    """Step on until blocks that are on their way to a tier are there: an engine in this process has no loop that does."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    while core is not None and core.scheduler.has_requests():
        llm.llm_engine.step()
        time.sleep(0.001)  # the tiers' threads stand behind this one, and have to come to their turn


def _generate(
    llm: Any,
    prompts: list[list[int]],
    sampling: dict[str, Any] | list[dict[str, Any]],
    lora: list[str | None] | None = None,
    salts: list[str | None] | None = None,
    **media: list[int],
) -> list[dict[str, Any]]:
    from tests.support.multimodal import prompt

    wanted = list(map(parameters, sampling)) if isinstance(sampling, list) else parameters(sampling)
    requests = [adapter_request(path) for path in lora or ()]
    inputs = [prompt(ids, **{kind: media[kind][index] for kind in media}) for index, ids in enumerate(prompts)]
    for number, salt in enumerate(salts or ()):
        inputs[number] |= {"cache_salt": salt} if salt else {}
    outputs = llm.generate(inputs, wanted, use_tqdm=False, lora_request=requests or None)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            **_logprobs(output.outputs[0]),
        }
        for output in outputs
    ]


def adapter_request(folder: str | None) -> Any:
    """Return what asks for the adapter in a folder, which has one number in all rounds; None for none."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(folder, zlib.crc32(folder.encode()) >> 1, folder) if folder else None


def parameters(sampling: dict[str, Any]) -> Any:
    """Return vLLM's parameters of a request; tokens stay as they are, and the end of a text is none, unless said."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    sampling = {"detokenize": False, "ignore_eos": True} | sampling
    if "structured_outputs" in sampling:
        sampling["structured_outputs"] = StructuredOutputsParams(**sampling["structured_outputs"])
    return SamplingParams(**sampling)


def _pool(llm: Any, prompts: list[list[int]], task: str = "embed") -> list[dict[str, Any]]:
    outputs = getattr(llm, task)([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    field = {"embed": "embedding", "classify": "probs"}[task]
    return [{field: getattr(output.outputs, field)} for output in outputs]


def _logprobs(output: Any) -> dict[str, Any]:
    if output.logprobs is None:
        return {}
    known = [{token: one.logprob for token, one in step.items()} for step in output.logprobs]
    chosen = [step[token] for step, token in zip(known, output.token_ids, strict=True)]
    return {"logprobs": chosen, "best": [max(step.values()) for step in known], "known": known}


if __name__ == "__main__":
    main(*sys.argv[1:])
