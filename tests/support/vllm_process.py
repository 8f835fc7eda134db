"""Runs programs in processes that have imported vLLM: forks of one that each pytest process keeps."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from tests.support.forks import ForkServer

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

__all__ = ["run_module", "run_program"]

IMPORTS = ("vllm.entrypoints.llm", "vllm.v1.engine.core", "npu_platform.worker", "npu_platform.model_runner")
# OpenMP's threads sleep, which is fair beside other tests; OpenMP reads this when it is loaded.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


def run_program(program: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program with further environment variables, which vLLM and the device read when they are used."""
    return _server().run(program, *arguments, environ=os.environ | PASSIVE | environ, timeout=500)


def run_module(name: str, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Do as ``python -m``."""
    program = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    return run_program(program, name, *map(str, arguments), **environ)


@cache
def _server() -> ForkServer:
    return ForkServer(*IMPORTS, environ=os.environ | PASSIVE)
