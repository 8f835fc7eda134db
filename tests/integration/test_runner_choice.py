"""Which of vLLM's model runners an engine has where the user named none: V2 if it knows the configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton")

NOTHING: dict[str, str] = {}
OPEN = {"TRITON_DEFAULT_BACKEND": "npu"}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
KNOWN = "Triton is there, and V2 knows this configuration"
PROCESSORS = ("few_tokens", "few_tokens_v2")  # of V1's class and of V2's
ECHO = {"method": "custom_class", "model": "tests.support.proposers.Echo", "num_speculative_tokens": 2}
CONFIGURE = """
import json, os, sys
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from npu_platform import config
envs.enable_envs_cache()  # as an engine does
said = []
for arguments in json.loads(sys.argv[1]):
    made = EngineArgs(skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=1 << 24, **arguments)
    made = made.create_engine_config()
    assert made.use_v2_model_runner == config.chose_v2_runner()
    environ = [os.environ[name] for name in ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_DEFAULT_BACKEND") if name in os.environ]
    assert environ in (["0"], ["0", "npu"], ["0", "nvidia"], ["1", "npu"], ["1"]), environ
    said.append(["V2" if made.use_v2_model_runner else "V1", config.why_this_runner()])
    said[-1].append(made.scheduler_config.async_scheduling)
print("SAID " + json.dumps(said))
"""


def chosen(configurations: list[dict[str, Any]], **environ: str) -> list[list[Any]]:
    """Return the runner of each, one after the other in one process, why, and whether it schedules ahead."""
    return said_by(CONFIGURE, configurations, **environ)


def said_by(program: str, configurations: list[dict[str, Any]], *more: str, **environ: str) -> list[list[Any]]:
    """Return what the program says of them."""
    done = run_program(program, json.dumps(configurations), *more, NPU_SIMULATOR_MEMORY="1GiB", **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-3000:]
    said: list[list[Any]] = json.loads(line.removeprefix("SAID "))
    return said


@pytest.mark.nightly
@pytest.mark.parametrize("environ", [NOTHING, OPEN], ids=["nothing", "triton"])
def test_each_configuration_has_the_runner_that_knows_it(environ: dict[str, str], tmp_path: Path) -> None:
    llama, hybrid = (str(make(tmp_path / make.__name__)) for make in (models.tiny_llama, models.tiny_nemotron_h))
    processors = [{"model": llama, "logits_processors": [f"tests.support.{name}:FewTokens"]} for name in PROCESSORS]
    plain, replayed = {"model": llama}, {"model": hybrid, "use_replayssm": True}
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    drafted = {"model": hybrid, "speculative_config": ngram, "async_scheduling": False}
    stages = {"pipeline_parallel_size": 2}
    drafts = [drafted | {"enable_prefix_caching": cached} for cached in (True, False)]
    asked = [plain, plain | {"speculative_config": ECHO}, plain, *processors, replayed, *drafts, plain | stages]
    said = chosen([*asked, processors[0] | stages], NPU_SIMULATOR_DEVICES="2", **environ)
    assert [runner for runner, _, _ in said] == ["V2", "V1", "V2", "V1", "V2", "V1", "V1", "V2", "V2", "V1"]
    assert "V2 does not have speculative method 'custom_class'" in said[1][1]
    assert "V2 does not have logits processors of V1's class (FewTokens is not a subclass" in said[3][1]
    assert "V2 does not have ReplaySSM by Triton" in said[5][1]
    assert "V2 does not have prefix caching of states beside drafts" in said[6][1]
    assert {said[i][1] for i in (0, 2, 4, 7, 8)} == {KNOWN}
    assert [ahead for _, _, ahead in said[-2:]] == [True, False]  # V1 cannot schedule stages ahead


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (NOTHING, ["V2", KNOWN]),
        (V1, ["V1", "VLLM_USE_V2_MODEL_RUNNER=0"]),
        (OPEN | V1, ["V1", "VLLM_USE_V2_MODEL_RUNNER=0"]),
        ({"TRITON_DEFAULT_BACKEND": "nvidia"}, ["V1", "TRITON_DEFAULT_BACKEND=nvidia"]),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, ["V2", "VLLM_USE_V2_MODEL_RUNNER=1"]),
    ],
)
def test_the_users_choice_stays(environ: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    model = {"model": str(models.tiny_llama(tmp_path / "model"))}
    assert [said[:2] for said in chosen([model, model], **environ)] == [expected] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("environ", [NOTHING, OPEN], ids=["nothing", "triton"])
def test_without_a_compiler_it_is_v1(environ: dict[str, str], tmp_path: Path) -> None:
    """Even where a cache is warm: it has the kernels of one configuration."""
    model = {"model": str(models.tiny_llama(tmp_path / "model"))}
    ((runner, why, _),) = chosen([model], CXX="no-such-compiler", **environ)
    assert (runner, "C++ compiler" in why) == ("V1", True)


LATER = """
import os
import vllm.entrypoints.llm
os.environ |= dict([sys.argv[2].split("=")])
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (NOTHING, "VLLM_USE_V2_MODEL_RUNNER=0", ["V1", "VLLM_USE_V2_MODEL_RUNNER=0"]),
        (NOTHING, "VLLM_USE_V2_MODEL_RUNNER=1", ["V2", "VLLM_USE_V2_MODEL_RUNNER=1"]),
    ],
)
def test_a_variable_that_is_set_after_vllm_was_imported_counts(
    before: dict[str, str], after: str, expected: list[str], tmp_path: Path
) -> None:
    model = [{"model": str(models.tiny_llama(tmp_path / "model"))}]
    assert said_by("import sys" + LATER + CONFIGURE, model, after, **before) == [[*expected, False]]


def test_where_vllm_was_imported_without_triton_it_is_v1(tmp_path: Path) -> None:
    """The variable that said so is gone when the engine is made: the modules are as they are."""
    model = [{"model": str(models.tiny_llama(tmp_path / "model"))}]
    program = "import os\nimport vllm.entrypoints.llm\ndel os.environ['VLLM_USE_V2_MODEL_RUNNER']\n" + CONFIGURE
    ((runner, why, _),) = said_by(program, model, **V1)
    assert (runner, why) == ("V1", "npu was not Triton's one device when vLLM was imported")
