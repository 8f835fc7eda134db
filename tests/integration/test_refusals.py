"""What npu cannot do is refused at start by name and with the way out: each refusal that there is, really asked for."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.support import refusals_page
from tests.support.environments import ROOT
from tests.support.refusals import Case, ask, cases, mixture_of_experts, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CASES = cases()
DRAFTS_OF_V2 = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_max": 2,
    "rejection_sample_method": "block",
    "num_speculative_tokens_per_batch_size": [[1, 8, 2], [9, 64, 1]],
}
ACCEPTED = {
    "plain": Case({}, "accepted"),
    "v1": Case({}, "accepted", {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "v2": Case({}, "accepted", {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "triton": Case({"model": "{kimi-linear}"}, "accepted"),
    "triton-on-v1": Case(
        {"model": "{olmo-hybrid}"},
        "accepted",
        {"VLLM_USE_V2_MODEL_RUNNER": "0", "TRITON_DEFAULT_BACKEND": "npu"},
    ),
    "v2-drafts": Case({"speculative_config": DRAFTS_OF_V2}, "accepted", {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "dense-invariant": Case({}, "accepted", {"VLLM_BATCH_INVARIANT": "1", "NPU_SIMULATOR_DEVICES": "4"}),
    "ranks-invariant": Case(
        {"tensor_parallel_size": 4}, "accepted", {"VLLM_BATCH_INVARIANT": "1", "NPU_SIMULATOR_DEVICES": "4"}
    ),
    "mixture": Case({"model": "{mixture}"}, "accepted"),
    "v2-routed-experts": Case(
        {"model": "{mixture}", "enable_return_routed_experts": True}, "accepted", {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    ),
}
SENTENCES = ROOT / "packages/npu-platform/src/npu_platform/unsupported.py"
# Beginnings of sentences that no engine of these tests can ask for -> where they are tested, or why not.
ELSEWHERE = {
    "Speculation by 'ngram' needs numba": "packages/npu-platform/tests/test_features.py",
    "FLy and quantised heads": "packages/npu-platform/tests/test_features.py, since they are of vLLM 0.33",
    "One kernel a layer": "packages/npu-platform/tests/test_features.py, since it is of vLLM 0.33",
    "vllm-bnb-plugin packs": "packages/npu-platform/tests/test_features.py, since the plugin is in no environment here",
    "The experts of vllm-bnb-plugin": "packages/npu-platform/tests/test_features.py, likewise",
    "Heads of the kind": "no such head is small enough to be made here",
    "This device has no graphs": "packages/npu-platform/tests/test_capabilities.py",
    "This device runs compiled models only": "packages/npu-platform/tests/test_capabilities.py",
    "This device does not read the host's memory": "packages/npu-platform/tests/test_capabilities.py",
    "With NPU_DEBUG=memory none but": "packages/npu-platform/tests/test_kv_transfer.py",
}
PAGE = ROOT / "docs" / "reference" / "refusals.md"
# As EngineArgs would, but without it: nothing has loaded vLLM's general plugins before.
BY_HAND = """
import json, sys, torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
assert not hasattr(torch.ops.npu_ops, "fused_experts")
VllmConfig(model_config=ModelConfig(**json.loads(sys.argv[1])), device_config=DeviceConfig("npu"))
assert hasattr(torch.ops.npu_ops, "fused_experts")
print("npu-ops is loaded")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return ask(CASES | ACCEPTED, tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, said: dict[str, str]) -> None:
    assert re.search(CASES[name].sentence, said[name], re.DOTALL), said[name]


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_asks_for_nothing_of_it_is_accepted(name: str, said: dict[str, str]) -> None:
    assert said[name] == "accepted"


def test_sentences_do_not_blame_a_variable_that_nobody_set(said: dict[str, str]) -> None:
    blamed = [name for name, words in said.items() if "unset VLLM_USE_V2_MODEL_RUNNER" in words]
    assert blamed == [name for name, case in CASES.items() if case.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"]


def sentences() -> Iterator[str]:
    """Yield every sentence of the platform's list as a regular expression."""
    for node in ast.walk(ast.parse(SENTENCES.read_text())):
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            yield "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts)


@pytest.mark.parametrize("sentence", sorted(sentences()))
def test_every_sentence_is_met(sentence: str, said: dict[str, str]) -> None:
    elsewhere = any(sentence.startswith(re.escape(beginning)) for beginning in ELSEWHERE)
    assert elsewhere or any(re.search(sentence, words, re.DOTALL) for words in said.values())


def test_a_configuration_built_by_hand_has_the_kernels_of_npu_ops(tmp_path: Path) -> None:
    done = run(BY_HAND, {"model": str(mixture_of_experts(tmp_path))})
    assert "npu-ops is loaded" in done.stdout, done.stderr[-3000:]


def test_the_page_is_current(said: dict[str, str]) -> None:
    assert PAGE.read_text() == refusals_page.text(said), (
        "python -m tests.support.refusals_page > docs/reference/refusals.md"
    )
