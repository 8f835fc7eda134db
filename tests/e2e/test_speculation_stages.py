"""Heads that draft on the last of two pipeline stages, which vLLM's V2 runner has for EAGLE-3 and for DeepSeek's head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import drafters, models
from tests.support.engine_run import run_scenarios

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

NEW = 24
DRAFTS = 3
PROMPTS = models.prompt_token_ids([1, 2, 15, 16, 17, 40, 300])
ROUND = {"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": NEW}}
ALL_ACCEPTED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": DRAFTS + 1.0}


@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank a stage", "two"])
@pytest.mark.parametrize("head", ["EAGLE-3", "DeepSeek's"])
def test_tokens_and_drafts_are_those_of_one_device(head: str, ranks: int, tmp_path: Path) -> None:
    """The second round comes from the prefix cache; where chance accepts every draft, they are what is said."""
    target, drafter, config = made(head, tmp_path)
    config["num_speculative_tokens"] = DRAFTS
    plain = drafters.ENGINE | {"model": str(target), "enable_prefix_caching": True}
    stages = {"pipeline_parallel_size": 2, "tensor_parallel_size": ranks}
    scenarios: list[dict[str, Any]] = [
        {"engine": plain, "rounds": [ROUND]},
        {"engine": plain | stages | {"speculative_config": config}, "rounds": [ROUND] * 2},
        {"engine": plain | stages | {"speculative_config": config | ALL_ACCEPTED}, "rounds": [ROUND]},
    ]
    environ = {"NPU_SIMULATOR_DEVICES": "4", "NPU_SIMULATOR_MEMORY": "2GiB"}
    alone, drafted, accepted = run_scenarios(tmp_path / "runs", scenarios, environ)
    assert (drafted.platform, drafted.runner) == ("npu", "V2")
    assert drafted.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert drafted.tokens(0) == drafted.tokens(1) == alone.tokens(0)
    drafts, right = (accepted.metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert right > 0.5 * drafts
    for prompt, output in zip(PROMPTS, accepted.tokens(0), strict=True):
        drafters.assert_drafted(target, drafter, prompt, output, DRAFTS)


def made(head: str, folder: Path) -> tuple[Path, drafters.Drafter, dict[str, Any]]:
    """Return a model, who drafts for it, and what is said to vLLM."""
    target = folder / "target"
    if head == "EAGLE-3":
        models.tiny_llama(target)
        return target, drafters.eagle3(folder / "head", target), {"method": "eagle3", "model": str(folder / "head")}
    return target, drafters.deepseek_with_head(target), {"method": "mtp"}
