"""Lists the code that hangs off the modules and classes of vLLM, torch and transformers, after a run or without one.

As a command it does one of two things and prints JSON:
  python -m tests.support.attributes run FOLDER         generate on npu with the model in FOLDER, then list; and list
                                                        while the worker starts and in the middle of a step
  python -m tests.support.attributes import FILE        import the modules named in FILE (JSON), then list
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import types
import unittest.mock
from pathlib import Path
from typing import Any

import torch

from npu_platform import config

__all__ = ["HOSTS", "listing"]

HOSTS = ("vllm", "torch", "transformers")


def listing() -> dict[str, str]:
    """Return, for each attribute of a host's module or class that is code, where that code was written.

    A key is `module:name` or `module:class.name`; a value is `top-level package:qualified name`.
    """
    found: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in HOSTS and isinstance(module, types.ModuleType):
            for attribute, value in list(vars(module).items()):
                _note(found, f"{name}:{attribute}", value)
                if isinstance(value, type) and value.__module__ == name:
                    for member, inner in list(vars(value).items()):
                        _note(found, f"{name}:{value.__qualname__}.{member}", inner)
    return found


def _note(found: dict[str, str], key: str, value: Any) -> None:
    code = _unwrap(value)
    if isinstance(code, unittest.mock.NonCallableMock):
        found[key] = "unittest:mock"
    elif isinstance(code, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)):
        found[key] = f"{_origin(code)}:{code.__qualname__}"


def _unwrap(value: Any) -> Any:
    """Return the function behind a property, a partial, a bound method or a class or static method."""
    while True:
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, (functools.partial, functools.partialmethod, functools.cached_property)):
            value = value.func
        elif isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        else:
            return value


def _origin(code: Any) -> str:
    """Return the top-level package of the code itself: a wrapper made by functools.wraps still has its own globals."""
    if isinstance(code, types.FunctionType):
        module = code.__globals__.get("__name__")
    elif isinstance(code, types.MethodDescriptorType):
        module = code.__objclass__.__module__
    else:
        module = code.__module__
    return str(module or "").partition(".")[0]


class Witness:
    """Lists what hangs off the hosts at moments of a run; each moment once."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, str]] = {}
        self.serving = False

    def note(self, moment: str) -> None:
        """List now, if this is the first time at this moment."""
        if moment not in self.seen:
            self.seen[moment] = listing()

    def forward(self, *_: Any) -> None:
        """Note the moment at which a module is called; torch calls this for every module."""
        if torch.npu.is_initialized():
            self.note("capture" if torch.npu.is_current_stream_capturing() else "step" if self.serving else "profile")


WITNESS = Witness()


def _witness_processor() -> type:
    """Return a logits processor that changes nothing: its construction is in the runner's, its use in the sampler."""
    return _of_v1() if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else _of_v2()


def _of_v2() -> type:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    class WitnessProcessor(LogitsProcessor):
        def __init__(self, *_: Any) -> None:
            WITNESS.note("construction")

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            return True

        def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
            if WITNESS.serving:  # the warm-up of kernels samples, too
                WITNESS.note("sampling")
            return logits

    return WitnessProcessor


def _of_v1() -> type:
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class WitnessProcessor(LogitsProcessor):
        def __init__(self, *_: Any) -> None:
            WITNESS.note("construction")

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            pass

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            WITNESS.note("sampling")
            return logits

    return WitnessProcessor


def _run(folder: str) -> dict[str, dict[str, str]]:
    """Generate in this process, with graphs, a KV cache small enough to preempt, and sampling; then shut down.

    Returns what is different from the end at each moment that the witness saw.
    """
    from vllm import LLM, SamplingParams

    torch.nn.modules.module.register_module_forward_pre_hook(WITNESS.forward)
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=2**24,
        max_num_seqs=4,
        logits_processors=[_witness_processor()],
    )
    WITNESS.serving = True
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 40)]
    for temperature in (0.0, 1.0):
        outputs = llm.generate(
            prompts, SamplingParams(temperature=temperature, max_tokens=8, top_p=0.9, detokenize=False)
        )
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    llm.llm_engine.engine_core.shutdown()
    end = listing()
    return {
        moment: {key: origin for key, origin in seen.items() if end.get(key) not in (None, origin)}
        for moment, seen in WITNESS.seen.items()
    }


def main(command: str, argument: str) -> None:
    """Do what the module's docstring says; the last line printed is the listing."""
    during = {}
    if command == "run":
        during = _run(argument)
    else:
        for name in json.loads(Path(argument).read_text()):
            with contextlib.suppress(Exception):  # some need a device; what they hold is then not compared
                importlib.import_module(name)
    modules = [name for name in sys.modules if name.partition(".")[0] in HOSTS]
    device = sys.modules.get("torch.npu")
    where = inspect.getfile(device) if device else None
    v2 = device is not None and config.chose_v2_runner()
    seen = {"modules": modules, "device": where, "runner": "V2" if v2 else "V1"}
    print(json.dumps(seen | {"code": listing(), "during": during}))


if __name__ == "__main__":
    main(*sys.argv[1:])
