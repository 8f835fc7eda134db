"""Blocks of each kind of model come back from the host tier with equal tokens; test_kv_offload.py does more by night.

The engines run one after the other in a process. Each is asked, forgets what its device has, and is asked again; another
of the same settings is asked without a connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support import models
from tests.support.adapters import adapter
from tests.support.engine_run import EngineRun, run_scenarios

if TYPE_CHECKING:
    from pathlib import Path

PROMPT, NEW, BLOCK = 120, 8, 32
WHOLE = (PROMPT - 1) // BLOCK * BLOCK
STATES = 290  # tokens of a prompt whose states are kept, at the end of a block of 272
FORGET = {"calls": [["reset_prefix_cache", {}]]}
WITHOUT = {"kv_transfer_config": None, "enable_prefix_caching": False}
FEW = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 40}
"""So few blocks that prompts beyond a window cannot all load at one time, though vLLM's scheduler takes it that they can."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding windows": ("gemma3", {}),
    "sliding windows, few blocks": ("gemma3", FEW),
    "latent attention": ("deepseek_v2", {}),
    "states": ("granite_hybrid", {"max_model_len": 512, "enable_prefix_caching": True, "block_size": None}),
    "eight bits": ("llama", {"kv_cache_dtype": "int8_per_token_head"}),
    "adapters and salts": ("llama", {"enable_lora": True, "max_lora_rank": 8}),
}


def asked(kind: str, lora: Path) -> dict[str, Any]:
    """Return a round: two prompts, or one of them for whom it is not the same."""
    sampling = {"temperature": 0.0, "max_tokens": NEW}
    if KINDS[kind][1] is FEW:
        return {"prompts": models.prompt_token_ids([150, 150, 130, 125], seed=7), "sampling": sampling}
    one, other = models.prompt_token_ids([STATES if kind == "states" else PROMPT] * 2, seed=4)
    if kind != "adapters and salts":
        return {"prompts": [one, other], "sampling": sampling}
    of_whom = {"lora": [None, str(lora), None], "salts": [None, None, "mine"]}
    return {"prompts": [one] * 3, "sampling": sampling, **of_whom}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """Run all engines."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: {**models.MAKERS, **models.RECURRENT}[name](folder / name) for name, _ in KINDS.values()}
    lora = adapter(
        folder / "adapter", AutoModelForCausalLM.from_pretrained(made["llama"]), ["q_proj", "v_proj"], 8, seed=3
    )
    extra = {"cpu_bytes_to_use": "64MiB", "offload_prompt_only": False}
    transfer = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    common = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "block_size": BLOCK}
    common |= {"num_gpu_blocks_override": 60, "enforce_eager": True, "kv_transfer_config": transfer}
    scenarios: dict[str, dict[str, Any]] = {}
    for kind, (name, engine) in KINDS.items():
        settings, ask = {**common, "model": str(made[name]), **engine}, asked(kind, lora)
        scenarios[kind] = {"engine": settings, "rounds": [ask, FORGET, ask]}
        scenarios[without(kind)] = {"engine": {**settings, **WITHOUT}, "rounds": [ask]}
    return dict(zip(scenarios, run_scenarios(folder, list(scenarios.values())), strict=True))


def without(kind: str) -> str:
    """Return the name of the engine that has no connector."""
    return f"{kind}, no connector"


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_come_back_with_equal_tokens(kind: str, runs: dict[str, EngineRun]) -> None:
    first, _, again = runs[kind].rounds
    assert [one["cached"] for one in first] == [0] * len(first)
    assert all(one["cached"] >= WHOLE for one in again), again
    assert runs[kind].tokens(0) == runs[kind].tokens(2) == runs[without(kind)].tokens(0)
    assert runs[kind].metrics["vllm:kv_offload_load_bytes"] > 0


def test_adapters_and_salts_have_blocks_of_their_own(runs: dict[str, EngineRun]) -> None:
    plain, adapted, salted = runs["adapters and salts"].tokens(0)
    assert plain == salted != adapted
