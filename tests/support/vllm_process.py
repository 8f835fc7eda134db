"""Runs programs in processes that have imported vLLM: forks of one that a run of pytest keeps."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import IO, TYPE_CHECKING

from tests.support.environments import ROOT
from tests.support.forks import ForkServer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.forks import Fork

__all__ = ["run_module", "run_program", "start_module"]

IMPORTS = ("vllm.entrypoints.llm", "vllm.v1.engine.core", "npu_platform.worker", "npu_platform.model_runner")
SERVING = ("vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server")
KNOWN = ("tests.support.known_models",)
# OpenMP's threads sleep, which is fair beside other tests; OpenMP reads this when it is loaded.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
# vLLM reads them when it is imported, so that processes with others come from another one.
READ_AT_IMPORT = ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_DEFAULT_BACKEND", "TRITON_BACKENDS_IN_TREE")
_MAKING = threading.Lock()


AS_MODULE = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


def run_program(program: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program with further environment variables, which vLLM and the device read when they are used."""
    with _MAKING:
        server = _server(_early(os.environ | environ))
    return server.run(program, *arguments, environ=os.environ | PASSIVE | environ, timeout=500)


def run_module(name: str, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Do as ``python -m``."""
    return run_program(AS_MODULE, name, *map(str, arguments), **environ)


def start_module(name: str, *arguments: str, environ: Mapping[str, str], output: IO[bytes]) -> Fork:
    """Start ``python -m``, which leads a session of its own, with exactly this environment; all it prints is `output`."""
    with _MAKING:
        server = _server(_early(environ))
    return server.start(AS_MODULE, name, *arguments, environ=environ, stdout=output, stderr=output, new_session=True)


def _early(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, environ[name]) for name in READ_AT_IMPORT if name in environ)


@cache
def _server(early: tuple[tuple[str, str], ...]) -> ForkServer:
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))  # where KNOWN is
    inherited = {name: value for name, value in os.environ.items() if name not in READ_AT_IMPORT}
    environ = inherited | PASSIVE | {"PYTHONPATH": path} | dict(early)
    return ForkServer(*IMPORTS, *SERVING, *KNOWN, environ=environ, name=f"vllm {early}")
