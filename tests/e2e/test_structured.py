"""Answers of a given form, by the backends that vLLM has for it, from a model that was taught to answer.

Not by lm-format-enforcer: its integration (0.11.3) imports modules that vLLM 0.32 no longer has, on every device, so that
it is refused.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest

from npu_platform.demo import MODEL
from tests.support.vllm_process import run_program

pytestmark = pytest.mark.nightly

SCHEMA = {
    "type": "object",
    "properties": {"country": {"enum": ["Peru", "Norway"]}, "capital": {"enum": ["Oslo", "Lima"]}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": json.dumps(SCHEMA)},
    "regex": {"regex": r"[A-Z][a-z]{2,8}, [0-9]{2}"},
    "choice": {"choice": ["Paris", "Rome", "Lima"]},
    "grammar": {"grammar": 'root ::= "The capital is " city\ncity ::= "Lima" | "Oslo"\n'},
}
LARK = {"grammar": 'start: "The capital is " city\ncity: "Lima" | "Oslo"\n'}
BACKENDS = {
    "xgrammar": FORMS,
    "guidance": FORMS | {"grammar": LARK},
    "outlines": {name: form for name, form in FORMS.items() if name != "grammar"},  # vLLM refuses grammars for it
}
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.platforms import current_platform

model, cases = sys.argv[1], json.loads(sys.argv[2])
said = {"platform": current_platform.device_type}
for backend, forms in cases.items():
    llm = LLM(model, max_model_len=256, max_num_seqs=8, kv_cache_memory_bytes=1 << 25,
              structured_outputs_config={"backend": backend, "disable_any_whitespace": backend in ("xgrammar", "guidance")})
    asked = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(**form))
             for form in forms.values()]
    free = SamplingParams(temperature=0, max_tokens=8)  # a request without a form beside them
    outputs = llm.generate(["What is the capital of Peru?"] * (len(asked) + 1), [*asked, free], use_tqdm=False)
    said[backend] = dict(zip(forms, (output.outputs[0].text for output in outputs)))
    llm.llm_engine.engine_core.shutdown()
print("SAID " + json.dumps(said))
"""


@cache
def said() -> dict[str, Any]:
    """What each backend lets the model say, asked in one process."""
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "2GiB"}
    done = run_program(PROGRAM, str(MODEL), json.dumps(BACKENDS), **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line.removeprefix("SAID "))


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_have_the_form(backend: str) -> None:
    answers = said()[backend]
    assert said()["platform"] == "npu"
    jsonschema.validate(json.loads(answers["json"]), SCHEMA)
    assert re.fullmatch(FORMS["regex"]["regex"], answers["regex"])
    assert answers["choice"] in FORMS["choice"]["choice"]
    if "grammar" in BACKENDS[backend]:
        assert answers["grammar"] in ("The capital is Lima", "The capital is Oslo")
