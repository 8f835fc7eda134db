"""What one process has compiled, the next one finds: it starts no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.compilers import compilations, noting_compiler

KERNEL = """
import torch, triton
import triton.language as tl

@triton.jit
def fill(out, value, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, value, mask=i < n)

out = torch.zeros(100, device="npu")
fill[(2,)](out, 7.0, 100, BLOCK=64)
assert out.eq(7).all()
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    program = tmp_path / "kernel.py"
    program.write_text(KERNEL)
    noted = noting_compiler(tmp_path) | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    counts = []
    for _ in range(2):
        subprocess.run([sys.executable, program], env={**os.environ, **noted}, check=True, timeout=300)
        counts.append(compilations(tmp_path))
    assert counts == [1, 1]
