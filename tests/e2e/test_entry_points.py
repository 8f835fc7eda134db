"""What a package that a user installs beside ours brings by its entry points works on npu: a model, a processor of logits,
a processor of what goes in and comes out, and a route of the API server.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from npu_platform import activation
from tests.support import judges, models
from tests.support.environments import ROOT, add_distribution
from tests.support.server import serve_demo
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

ENTRY_POINTS = """
[vllm.general_plugins]
users_parts = tests.support.users_parts:register
[vllm.logits_processors]
few_tokens = {processor}
[vllm.io_processor_plugins]
lengths = tests.support.users_processor:lengths
[vllm.endpoint_plugins]
device_memory = tests.support.users_endpoint:DeviceMemory
"""
PROCESSORS = {"V1": "tests.support.few_tokens:FewTokens", "V2": "tests.support.few_tokens_v2:FewTokens"}
PROMPTS, LENGTHS, FEW = models.prompt_token_ids([5, 40], seed=8), [3, 20], 300
BEGIN = """
import json, sys
site, folder, asked, few = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, site)
from vllm import LLM, SamplingParams
settings = dict(model=folder, dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=1 << 26)
"""
GENERATING = """
base = dict(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=0)
both = [SamplingParams(**base), SamplingParams(**base, extra_args={"few_tokens": few})]
v2 = set()
def run(**more):
    llm = LLM(**settings | more, skip_tokenizer_init=True)
    v2.add(llm.llm_engine.vllm_config.use_v2_model_runner)
    answers = [llm.generate([{"prompt_token_ids": ids} for ids in asked], one, use_tqdm=False) for one in both]
    llm.llm_engine.engine_core.shutdown()
    return [[[[token, step[token].logprob] for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)]
             for output in outputs] for outputs in answers]
ran = [run(), run(hf_overrides={"architectures": ["HalvedLlama"]})]
print("SAID " + json.dumps([v2.pop(), *ran]))
"""
POOLING = """
llm = LLM(**settings, runner="pooling", io_processor_plugin="lengths")
(output,) = llm.encode({"data": asked}, pooling_task="plugin", use_tqdm=False)
print("SAID " + json.dumps(output.outputs))
"""


@pytest.mark.parametrize("runner", PROCESSORS)
def test_a_model_and_a_processor_of_logits(runner: str, tmp_path: Path) -> None:
    """The engine has the runner that the processor is written for."""
    folder = models.tiny_llama(tmp_path / "model")
    v2, plain, halved = said(tmp_path, folder, GENERATING, PROMPTS, PROCESSORS[runner])
    assert v2 == (runner == "V2")
    free, few = plain
    assert all(token < FEW for answer in few for token, _ in answer)
    assert any(token >= FEW for answer in free for token, _ in answer)
    assert [[token for token, _ in answer] for answer in halved[0]] == [
        [token for token, _ in answer] for answer in free
    ]
    assert all(
        half < whole
        for new, old in zip(halved[0], free, strict=True)
        for (_, half), (_, whole) in zip(new, old, strict=True)
    )


def test_a_processor_of_what_goes_in_and_comes_out(tmp_path: Path) -> None:
    folder = models.tiny_bert(tmp_path / "model")
    rows, embed = said(tmp_path, folder, POOLING, LENGTHS), judges.embedder(folder)
    assert [int(length) for length in rows] == LENGTHS
    for length, row in rows.items():
        expected = embed({"prompts": list(range(3, 3 + int(length)))})
        torch.testing.assert_close(torch.tensor(row), expected, atol=1e-4, rtol=0)


def test_a_route_of_the_server(tmp_path: Path) -> None:
    environ = beside_the_package(tmp_path / "site")
    # vLLM loads such plugins where this names them, and then no others that it does not name
    environ["VLLM_PLUGINS"] = ",".join((*activation.installed_plugins(), "device_memory"))
    extension = ("--worker-extension-cls", "tests.support.vital_signs.DeviceBytes")
    with serve_demo(tmp_path, *extension, fresh=True, **environ) as server:  # a fork would not look into PYTHONPATH
        answer = httpx.get(f"{server.url}/device_memory", timeout=60, trust_env=False)
    assert answer.json()["bytes"] > 0


def beside_the_package(site: Path, processor: str = PROCESSORS["V1"]) -> dict[str, str]:
    """Put the user's package into a folder; return what a process needs to find it."""
    add_distribution(site, "users-parts", "1.0", ENTRY_POINTS.format(processor=processor))
    return {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}


def said(tmp_path: Path, folder: Path, program: str, asked: Any, *processor: str) -> Any:
    """Run a program beside the installed package, with the engine in a process of its own."""
    site = tmp_path / "site"
    environ = beside_the_package(site, *processor) | {"NPU_SIMULATOR_MEMORY": "2GiB"}
    done = run_program(BEGIN + program, str(site), str(folder), json.dumps(asked), str(FEW), **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-4000:]
    return json.loads(line.removeprefix("SAID "))
