"""Blocks of an adapter that was loaded anew from the same path, with other weights: none of the old ones' is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM

from tests.support import models
from tests.support.adapters import adapter
from tests.support.engine_run import run_scenarios

if TYPE_CHECKING:
    from pathlib import Path

PROMPT, BLOCK, MIB = 150, 32, 1 << 20
WHOLE = (PROMPT - 1) // BLOCK * BLOCK
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 60,
    "enforce_eager": True,
    "enable_lora": True,
    "max_lora_rank": 8,
}
FORGET = {"calls": [["reset_prefix_cache", {}]]}


def test_an_adapter_of_other_weights_finds_its_own_blocks_alone(tmp_path: Path) -> None:
    folder = models.tiny_llama(tmp_path / "model", num_hidden_layers=2)
    model, name = AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "adapter")
    old, new = (str(adapter(tmp_path / f"seed{seed}", model, ["q_proj", "v_proj"], 8, seed)) for seed in (1, 2))
    ask = {"prompts": models.prompt_token_ids([PROMPT]), "sampling": {"temperature": 0.0, "max_tokens": 8}}
    ask |= {"lora": [name]}
    as_old, as_new = {"link": [name, old]}, {"link": [name, new]}
    alone = {**SETTINGS, "model": str(folder), "enable_prefix_caching": False}
    store = {"type": "durable", "path": str(tmp_path / "store"), "bytes": 64 * MIB}
    transfer = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"cpu_bytes_to_use": "16MiB", "secondary_tiers": [store]}
    tiered = {**SETTINGS, "model": str(folder), "kv_transfer_config": transfer}
    runs = run_scenarios(
        tmp_path,
        [
            {"engine": alone, "rounds": [as_old, ask]},
            {"engine": alone, "rounds": [as_new, ask]},
            # The engine goes on with the weights it has loaded, whatever lies there meanwhile.
            {"engine": tiered, "rounds": [as_old, ask, FORGET, ask, as_new, ask, as_old, FORGET, ask]},
            {"engine": tiered, "rounds": [as_new, ask, FORGET, ask]},
        ],
    )
    tokens = [run.rounds[1][0]["tokens"] for run in runs]
    assert tokens[0] != tokens[1], "the adapters do the same"
    changed, anew = ([one[0] for one in run.rounds if one] for run in runs[2:])
    assert [one["tokens"] for one in changed] == [tokens[0]] * 4
    assert [one["cached"] for one in changed] == [0, WHOLE, 0, WHOLE]
    assert [one["tokens"] for one in anew] == [tokens[1]] * 2
    assert [one["cached"] for one in anew] == [0, WHOLE]
