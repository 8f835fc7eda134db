"""Each of vLLM's model runners gives the tokens that transformers gives, from graphs of npu; V2 from Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.compilers import compilations, noting_compiler
from tests.support.engine_run import EngineRun, run_engine
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton")

NEW = 10
GREEDY = {"temperature": 0.0, "max_tokens": NEW}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": NEW}
# shorter and longer than a block and than a chunk, and their edges
PROMPTS = models.prompt_token_ids([1, 2, 15, 16, 17, 100, 255, 256, 257, 600])
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
RUNNERS = {"V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2": V2}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,  # prompts longer than this are prefilled in chunks
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 8, 16],
}

ASKED = """
import torch
import vllm.entrypoints.llm, vllm.v1.engine.core
from vllm.triton_utils import HAS_TRITON
print(HAS_TRITON, torch.npu.is_initialized())
"""

TOO_MUCH = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    settings = {"skip_tokenizer_init": True, "max_model_len": 128, "kv_cache_memory_bytes": 32 << 20}
    llm = LLM(sys.argv[1], enforce_eager=True, **settings)
    prompt = {"prompt_token_ids": [5, 6]}
    def ask(**settings):
        return llm.generate([prompt], SamplingParams(max_tokens=2, detokenize=False, **settings), use_tqdm=False)[0].outputs[0].token_ids
    for settings in (
        {"min_tokens": 1, "stop_token_ids": list(range(129))},
        {"allowed_token_ids": list(range(1025))},
        {"logit_bias": {token: 1.0 for token in range(1025)}},
    ):
        try:
            ask(**settings)
        except ValueError as error:
            print("REFUSED", error)
    ask(min_tokens=1, stop_token_ids=list(range(112)))
    print("ALLOWED", max(ask(allowed_token_ids=list(range(1024)))) < 1024)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=RUNNERS)
def run(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Prompts in chunks, the same again from the prefix cache, and seeded sampling twice."""
    greedy = {"prompts": PROMPTS, "sampling": GREEDY}
    seeded = {"prompts": PROMPTS[-3:], "sampling": SEEDED}
    return run_engine(
        tmp_path_factory.mktemp("run"), model, [greedy, greedy, seeded, seeded], RUNNERS[request.param], **ENGINE
    )


def test_greedy_tokens_are_those_of_transformers(model: Path, run: EngineRun) -> None:
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert len(output) == NEW
        assert_greedy(load(model), prompt, output)


def test_it_is_that_runner_with_graphs(run: EngineRun, request: pytest.FixtureRequest) -> None:
    assert run.platform == "npu"
    assert run.graphs_captured == len(ENGINE["cudagraph_capture_sizes"])
    assert run.runner == request.node.callspec.params["run"]
    assert f"npu takes vLLM's {run.runner} model runner" in run.log
    assert ("npu runs vLLM's V2 model runner" in run.log) is (run.runner == "V2")


def test_what_comes_from_the_prefix_cache_is_the_same(run: EngineRun) -> None:
    assert max(output["cached"] for output in run.rounds[1]) >= 512
    assert run.tokens(1) == run.tokens(0)


def test_a_seed_gives_the_same_tokens_again(run: EngineRun) -> None:
    assert run.tokens(2) == run.tokens(3)
    assert run.tokens(2) != run.tokens(0)[-3:]


def test_importing_vllm_opens_no_device() -> None:
    """Nor does Triton, which is there: a worker that is forked afterwards, as this one is, chooses its devices."""
    done = run_program(ASKED, **V2)
    assert done.stdout.split()[-2:] == ["True", "False"], done.stderr[-2000:]


@pytest.mark.nightly
def test_a_second_start_compiles_nothing(model: Path, tmp_path: Path) -> None:
    environ = V2 | noting_compiler(tmp_path) | {"TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    rounds = [{"prompts": PROMPTS[:4], "sampling": GREEDY}]
    first = run_engine(tmp_path / "first", model, rounds, environ, **ENGINE)
    compiled = compilations(tmp_path)
    second = run_engine(tmp_path / "second", model, rounds, environ, **ENGINE)
    assert compiled > 10
    assert compilations(tmp_path) == compiled
    assert second.tokens(0) == first.tokens(0)
    assert "JIT compilation during inference" not in first.log
    assert "Compiling Triton kernels that are not in" in first.log
    assert f"{compiled} Triton kernels compiled in" in first.log
    assert "Compiling Triton kernels" not in second.log
    assert "Triton kernels compiled" not in second.log


def test_what_its_buffers_do_not_hold_is_refused_and_the_engine_goes_on(model: Path) -> None:
    done = run_program(TOO_MUCH, str(model), **V2)
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout.splitlines()
    refused = [line.removeprefix("REFUSED ") for line in said if line.startswith("REFUSED")]
    assert [line.split(" must have at most")[0] for line in refused] == [
        "stop_token_ids beside min_tokens", "allowed_token_ids", "logit_bias",
    ]  # fmt: skip
    assert all(line.endswith("VLLM_USE_V2_MODEL_RUNNER=0.") for line in refused)
    assert "ALLOWED True" in said
