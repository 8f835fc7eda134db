"""Which implementation each layer of a loaded model runs, asked of the layers themselves.

A layer, its quantisation method, scheme or kernel, or its attention implementation may have the hook
``npu_implementation() -> str``, by which npu-ops (or a vendor's package) names the op and format that runs; what has
none is named by the method that vLLM calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["LayerKind", "of_checkpoint", "of_model", "text"]

HOOK = "npu_implementation"
_MARK, _FAILURE = "npu-layers:", "npu-layers-failure:"
_ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": -1,  # as much as the cache holds
    "skip_mm_profiling": True,
    "kv_cache_memory_bytes": 128 << 20,
}
_TOKENIZER_FILES = ("tokenizer*", "tekken*", "vocab*", "*.tiktoken", "*.model")
_MOST_OF_A_MESSAGE = 800  # characters: vLLM's may go on with the names of all architectures


@dataclass(frozen=True)
class LayerKind:
    """So many layers of one class that run the same; dtype: of their weights as they are kept, if they have any."""

    layer: str
    implementation: str
    dtype: str
    count: int


def of_model(model: nn.Module) -> list[LayerKind]:
    """Return what the layers of a loaded vLLM model run, in the model's order."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for module in model.modules():
        implementation = _implementation(module)
        if implementation is not None:
            counts[type(module).__name__, implementation, _dtype(module)] += 1
    return [LayerKind(*kind, count) for kind, count in counts.items()]


def of_checkpoint(model: str) -> list[LayerKind]:
    """Load `model` (a folder or name) with vLLM in a process of its own; raises RuntimeError with what it said."""
    if model.startswith(("/", ".", "~")) and not Path(model).exists():
        msg = f"{model} could not be loaded: there is no such folder; correct the path, or name a model of the hub."
        raise RuntimeError(msg)
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", __name__, model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    said = f"the process ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return [LayerKind(**kind) for kind in json.loads(line.removeprefix(_MARK))]
        if line.startswith(_FAILURE):
            said = json.loads(line.removeprefix(_FAILURE))
    msg = f"{model} could not be loaded: {said}"
    raise RuntimeError(msg)


def text(kinds: list[LayerKind]) -> Iterator[str]:
    """Yield a line a kind."""
    width = max((len(kind.layer) for kind in kinds), default=0)
    for kind in kinds:
        yield f"{kind.count:4} x {kind.layer:{width}}  {kind.implementation}{f'; {kind.dtype}' if kind.dtype else ''}"


def _implementation(module: nn.Module) -> str | None:
    method, scheme, attention = (getattr(module, name, None) for name in ("quant_method", "scheme", "impl"))
    for owner in (module, method, *_parts(method), scheme, *_parts(scheme), attention):
        hook = getattr(owner, HOOK, None)
        if callable(hook):
            name = hook()
            return f"{name}{_tier()}" if name.startswith("npu_ops::") else name
    forward = getattr(module, "_forward_method", None)
    for owner in (attention, method, forward):
        if owner is not None:
            named = owner if hasattr(owner, "__qualname__") else type(owner)
            return f"{named.__module__.split('.')[0]}: {named.__qualname__}"
    return None


def _parts(owner: Any) -> list[Any]:
    return list(vars(owner).values()) if hasattr(owner, "__dict__") else []


def _tier() -> str:
    import torch

    ops: Any = torch.ops.npu_ops
    if not hasattr(ops, "_isa"):
        return ""
    return f", {ops._isa()}{' emulated' if ops._isa_is_emulated() else ''}"


def _dtype(module: nn.Module) -> str:
    names = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in module.parameters(recurse=False))
    return ", ".join(names)


def _main(model: str) -> None:
    from vllm import LLM

    try:
        engine = LLM(model=model, skip_tokenizer_init=_has_no_tokenizer(model), **_ENGINE)
        kinds = engine.collective_rpc("layer_implementations")[0]
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        cut = f"{words[:_MOST_OF_A_MESSAGE]} ..." if len(words) > _MOST_OF_A_MESSAGE else words
        sys.stdout.write(f"{_FAILURE}{json.dumps(cut)}\n")
        raise
    sys.stdout.write(f"{_MARK}{json.dumps([asdict(kind) for kind in kinds])}\n")


def _has_no_tokenizer(model: str) -> bool:
    """Whether it is a folder of weights alone, whose layers can be looked at all the same."""
    folder = Path(model)
    return folder.is_dir() and not any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern))


if __name__ == "__main__":
    _main(sys.argv[1])
