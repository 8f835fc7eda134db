"""Layouts of an engine over several devices, and the kinds of models that each of them runs.

``Workshop`` makes the checkpoints and asks; what comes back is compared with one device's by tests/e2e/test_layouts.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support import models, quantized
from tests.support.adapters import adapter
from tests.support.engine_run import run_engine
from tests.support.launched_run import run_launched
from tests.support.network import Network, second_network
from tests.support.ray_nodes import two_nodes
from tests.support.replicas_run import run_replicas
from tests.support.servers_run import run_hosts, run_servers
from tests.support.transformers_reference import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = [
    "CASES",
    "EXCHANGED",
    "KINDS",
    "LAYOUTS",
    "ONE_DEVICE",
    "REFUSED",
    "How",
    "Kind",
    "Layout",
    "Workshop",
    "refusal",
]


@dataclass(frozen=True)
class Layout:
    """Engine arguments, how many devices they take and who starts the ranks; `changes` to the model's configuration.

    `starts`: the engine, its replicas (behind vLLM's own balancer), a launcher, servers (behind a balancer of the
    user's), hosts, or Ray. Servers and hosts have half of the devices each.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    devices: int = 2
    starts: str = "engine"
    changes: dict[str, Any] = field(default_factory=dict)
    of_experts: bool = False


@dataclass(frozen=True)
class How:
    """What changes how an engine computes, and no token: engine arguments, and variables of its processes."""

    engine: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """How a model's checkpoint is made, in {folder}; and the engine arguments that it has beside the others."""

    make: Callable[..., Path]
    engine: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    scheme: bool = False
    adapted: bool = False


_EXPERTS = {"enable_expert_parallel": True}
EXCHANGED = {"dcp_comm_backend": "a2a", "dcp_q_replicate": True}  # the latter is of latent attention
_BY_RAY = {"distributed_executor_backend": "ray"}
ONE_DEVICE = Layout(devices=1)
LAYOUTS: dict[str, Layout] = {
    "TP 2": Layout({"tensor_parallel_size": 2}),
    "PP 2": Layout({"pipeline_parallel_size": 2}),
    "TP 2, PP 2": Layout({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, devices=4),
    "DP 2": Layout(starts="replicas"),
    "EP over TP 2": Layout({"tensor_parallel_size": 2} | _EXPERTS, of_experts=True),
    "EP over DP 2": Layout(_EXPERTS, starts="replicas", of_experts=True),
    "EP over TP 2, DP 2": Layout({"tensor_parallel_size": 2} | _EXPERTS, devices=4, starts="replicas", of_experts=True),
    "TP 2, DCP 2": Layout(
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4},
        changes={"num_key_value_heads": 1},
    ),
    "TP 2, DCP 2 by all-to-all": Layout(
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4} | EXCHANGED,
        changes={"num_key_value_heads": 1},
    ),
    "TP 2, external launcher": Layout({"tensor_parallel_size": 2}, starts="launcher"),
    "EP over DP 2, external balancer": Layout(_EXPERTS, starts="servers", of_experts=True),
    "EP over DP 4, hybrid balancer": Layout(_EXPERTS, devices=4, starts="servers", of_experts=True),
    "TP 2 on two hosts": Layout({"tensor_parallel_size": 2}, starts="hosts"),
    "PP 2 on two hosts": Layout({"pipeline_parallel_size": 2}, starts="hosts"),
    "DP 2 on two hosts": Layout({"data_parallel_size": 2}, starts="hosts"),
    "EP over DP 2 on two hosts": Layout({"data_parallel_size": 2} | _EXPERTS, starts="hosts", of_experts=True),
    "TP 2, Ray": Layout({"tensor_parallel_size": 2} | _BY_RAY, starts="ray"),
    "PP 2, Ray": Layout({"pipeline_parallel_size": 2} | _BY_RAY, starts="ray"),
}
"""Names are those of docs/reference/layouts.md."""

_WITH_EXPERTS = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_DRAFTS = {"method": "draft_model", "model": "{folder}", "num_speculative_tokens": 3}
KINDS: dict[str, Kind] = {
    "dense": Kind(models.tiny_llama),
    "experts": Kind(models.tiny_qwen3_moe, experts=True),
    "latent attention": Kind(
        lambda folder, **changes: models.tiny_deepseek_v2(folder, **_WITH_EXPERTS | changes), experts=True
    ),
    "states": Kind(models.tiny_qwen3_next, experts=True),
    "LoRA": Kind(models.tiny_llama, {"enable_lora": True, "max_lora_rank": 8}, adapted=True),
    "W4A16": Kind(models.tiny_llama, scheme=True),
    "W4A16 experts": Kind(models.tiny_qwen3_moe, experts=True, scheme=True),
    "draft model": Kind(models.tiny_llama, {"speculative_config": _DRAFTS}),
}
"""The latent and the recurrent model have experts, too."""

REFUSED: dict[tuple[str, str], str] = {
    (".*PP 2.*", "draft model"): "leave out --speculative-config or --pipeline-parallel-size",
    ("EP over TP 2, DP 2", "latent attention"): "latent attention and experts are on ranks of both kinds",
    (".*DCP 2.*", "draft model"): "The cache of what drafts is not shared out among context-parallel ranks",
    (".*DCP 2.*", "states"): "States are not shared out among context-parallel ranks",
}
"""Patterns of layouts, and kinds -> what the engine says at start."""

CASES = [
    (layout, kind)
    for layout, its in LAYOUTS.items()
    for kind, what in KINDS.items()
    if what.experts or not its.of_experts
]
_PROMPTS = [prompt * 2 for prompt in models.prompt_token_ids([60, 17, 1, 12, 43, 21, 5, 80], seed=3)]
_ADAPTED = (1, 3, 4)  # which of the prompts go with the adapter
_NEW = 8
_FORK = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
_OF_A_NODE = {"NPU_SIMULATOR_MEMORY": "2GiB", "NPU_NUM_THREADS": "1"}
_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,  # so that prompts come in chunks
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [1, 4, 8],
}
_SCHEME: dict[str, Any] = {
    r".*layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj|mlp\.experts.*)": {
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "type": "int", "symmetric": True},
        "format": "pack-quantized",
    }
}


def refusal(layout: str, kind: str) -> str | None:
    """Return what an engine says that refuses this at start; None: it runs."""
    found = (said for (pattern, its), said in REFUSED.items() if its == kind and re.fullmatch(pattern, layout))
    return next(found, None)


class Workshop:
    """Makes in a folder, once each, what engines ask for, and runs them."""

    def __init__(self, folder: Path) -> None:
        """Begin with nothing made."""
        self._folder = folder
        self._known: dict[str, list[list[int]]] = {}
        self._held = contextlib.ExitStack()

    def close(self) -> None:
        """End the second host and Ray's nodes, if they were made."""
        self._held.close()

    def on_one_device(self, layout: Layout, kind: str) -> list[list[int]]:
        """Return what one device says to the prompts, with the model that this layout has."""
        name = json.dumps([kind, layout.changes])
        if name not in self._known:
            one = Layout(devices=1, changes=layout.changes)
            self._known[name] = self._ask(one, KINDS[kind], self._folder / "one", How())
        return self._known[name]

    def on_several(self, layout: Layout, kind: str, folder: Path, how: How | None = None) -> list[list[int]]:
        """Return what the layout says to the prompts.

        Raises ImportError and PermissionError where Ray is not there, or this user cannot make a second host.
        """
        return self._ask(layout, KINDS[kind], folder, how or How())

    def _ask(self, layout: Layout, kind: Kind, folder: Path, how: How) -> list[list[int]]:
        model = self._checkpoint(kind, layout.changes)
        plain = self._plain(kind, layout.changes)
        asked = _ENGINE | kind.engine | layout.engine | how.engine
        engine = json.loads(json.dumps(asked).replace("{folder}", str(plain)))
        lora = self._lora(kind, plain)
        rounds = [{"prompts": _PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": _NEW}, "lora": lora}]
        devices = {"NPU_SIMULATOR_DEVICES": str(layout.devices), "NPU_SIMULATOR_MEMORY": "2GiB"} | how.environ
        of_all = {"new": _NEW, "devices": layout.devices, "environ": how.environ} | engine
        if layout.starts == "replicas":
            return run_replicas(folder, model, _PROMPTS, offline=False, lora=lora, **of_all).tokens
        if layout.starts == "servers":
            return run_servers(folder, model, _PROMPTS, replicas=layout.devices // 2, **of_all)
        if layout.starts == "hosts":
            each = {"devices": layout.devices // 2, "environ": how.environ} | engine
            return run_hosts(folder, model, rounds, self._second_host, **each)
        if layout.starts == "launcher":
            return run_launched(folder, model, rounds, devices, ranks=layout.devices, **engine)
        environ = {"RAY_ADDRESS": self._cluster, **_OF_A_NODE} if layout.starts == "ray" else devices | _FORK
        return run_engine(folder, model, rounds, environ, **engine).tokens(0)

    @functools.cached_property
    def _second_host(self) -> Network:
        return self._held.enter_context(second_network())

    @functools.cached_property
    def _cluster(self) -> str:
        return str(self._held.enter_context(two_nodes())[0].address)

    def _lora(self, kind: Kind, plain: Path) -> list[str | None] | None:
        if not kind.adapted:
            return None
        layers = ["q_proj", "v_proj", "o_proj", "down_proj"]
        made = self._once(f"adapter {plain}", lambda folder: adapter(folder, load(plain), layers, 8, seed=1))
        return [str(made) if number in _ADAPTED else None for number in range(len(_PROMPTS))]

    def _plain(self, kind: Kind, changes: dict[str, Any]) -> Path:
        return self._once(f"{kind.make} {changes}", lambda folder: kind.make(folder, **changes))

    def _checkpoint(self, kind: Kind, changes: dict[str, Any]) -> Path:
        plain = self._plain(kind, changes)
        if not kind.scheme:
            return plain
        return self._once(f"W4A16 {plain}", lambda folder: quantized.compressed(folder, _SCHEME, plain))

    def _once(self, name: str, make: Callable[[Path], Any]) -> Path:
        folder = self._folder / hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()[:8]
        if not folder.exists():
            make(folder)
        return folder
