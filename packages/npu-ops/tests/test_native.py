from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import npu_ops
from npu_ops.errors import ConfigError
from tests.support.forks import ForkServer

VECTORS = "using V = float __attribute__((vector_size(64))); void f(V* a, V* b) { *a = *a * *b; }"


@functools.cache
def torch_is_imported():
    return ForkServer("torch", environ=os.environ, name="npu-ops")


def run(code, **environment):
    return torch_is_imported().run(code, environ=os.environ | environment)


def test_the_best_isa_is_the_default():
    assert run("import npu_ops; print(npu_ops.native.isa())", NPU_ISA="").stdout.strip() == npu_ops.native.highest_isa()


def test_environment_forces_a_lower_isa():
    result = run("import npu_ops; print(npu_ops.native.isa())", NPU_ISA="scalar")
    assert result.stdout.strip() == "scalar", result.stderr


PRODUCTS = """
import torch, npu_ops
from npu_ops import native

def product(rows):
    return torch.ops.npu_ops.linear(x[:rows], weight, None)

torch.manual_seed(0)
x, weight = torch.randn(70, 515).bfloat16(), torch.randn(67, 515).bfloat16()
isa, faster = native.isa(), native.product_isa()
native.set_batch_invariant(on=True)
assert native.product_isa() == isa, "one way for any number of rows"
native.set_batch_invariant(on=False)
few, many = [product(rows) for rows in (4, 5)], [product(rows) for rows in (6, 70)]
native.set_isa(isa)
assert native.product_isa() == isa, "who names one gets it for everything"
assert all(torch.equal(product(rows), out) for rows, out in zip((4, 5), few))
native.set_isa(faster)
assert all(torch.equal(product(rows), out) for rows, out in zip((6, 70), many))
print(isa, faster)
"""


def test_many_rows_take_the_isa_that_multiplies_faster():
    """Processes agree which that is, though each measures: of ranks the tokens would differ."""
    chosen = {run(PRODUCTS, NPU_ISA="").stdout.strip() for _ in range(5)}
    isas = npu_ops.native.isas()
    (isa, faster), *others = [one.split() for one in chosen]
    assert not others
    assert isa == npu_ops.native.highest_isa()
    assert isas.index(faster) <= isas.index(isa)


def test_unknown_isa_is_refused():
    result = run("import npu_ops", NPU_ISA="sse9")
    names = ", ".join(npu_ops.native.isas())
    assert f"NPU_ISA must be one of {names}, got 'sse9'" in result.stderr.splitlines()[-1]


def test_the_processor_has_the_instructions_of_what_it_runs():
    """As Linux tells them, who spells some of them in another way."""
    info = Path("/proc/cpuinfo").read_text()
    flags = info.partition("flags\t\t:")[2].partition("\n")[0].split()
    if not flags:
        pytest.skip("no x86_64")
    has = {flag.replace("avx512_", "avx512").replace("avx_vnni", "avxvnni") for flag in flags}
    runs = [isa for isa in npu_ops.native.isas() if set(npu_ops.native.instructions(isa)) <= has]
    assert npu_ops.native.highest_isa() == runs[-1]
    assert all(npu_ops.native.can_run(isa) for isa in runs)


def test_isa_beyond_the_machine_is_refused():
    missing = [name for name in npu_ops.native.isas() if not npu_ops.native.can_run(name)]
    if not missing:
        pytest.skip("this machine has all of them")
    with pytest.raises(ConfigError, match="this machine goes up to"):
        npu_ops.native.set_isa(missing[0])


def test_what_the_kernels_use_of_avx512_is_emulated_and_nothing_else():
    # Only `nox -s emulated`, by night, compiles that.
    kernels = Path(__file__).parents[1] / "csrc"
    emulation = kernels / "vector" / "emulated_avx512.h"
    sources = [each for each in kernels.rglob("*") if each.suffix in (".h", ".inc", ".cpp") and each != emulation]
    text = "".join(source.read_text() for source in sources)
    used = set(re.findall(r"\b_mm512_\w+", text))
    emulated = set(re.findall(r"#define (_mm512_\w+)", emulation.read_text()))
    assert "_mm512_dpbf16_ps" in used
    assert used == emulated


def test_a_tier_above_the_machine_is_called_emulated(isa):
    isas = npu_ops.native.isas()
    assert npu_ops.native.is_emulated() == (isas.index(isa) > isas.index(npu_ops.native.highest_isa()))


def test_loading_twice_is_harmless():
    npu_ops.native.load()
    assert npu_ops.native.available()


def test_import_needs_no_vllm():
    result = run("import sys, npu_ops; assert 'vllm' not in sys.modules; print('fine')")
    assert result.stdout.strip() == "fine", result.stderr


PROGRAM = """
import resource, sys, torch, npu_ops
device, spare = sys.argv[1], int(sys.argv[2])
width = 8 << 20
x, weight = torch.randn(4, width).bfloat16().to(device), torch.ones(width).bfloat16().to(device)
norm = lambda: torch.ops.npu_ops.rms_norm(x, weight, 1e-6)
torch.ops.npu_ops.rms_norm(x[:, :16384], weight[:16384], 1e-6)  # the threads start
pages = int(open("/proc/self/statm").read().split()[0])
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (spare << 20), unlimited[1]))
try:
    norm()
except RuntimeError as error:
    assert "out of memory: a kernel found no 33554" in str(error), error
else:
    raise SystemExit("the limit was not met")
resource.setrlimit(resource.RLIMIT_AS, unlimited)
expected = torch.nn.functional.rms_norm(x.cpu().float(), (width,), eps=1e-6)
torch.testing.assert_close(norm().cpu().float(), expected, rtol=2**-7, atol=1e-3)
print("fine")
"""


def test_too_little_memory_for_scratch_is_an_error(device):
    """One that the op's caller gets, whichever thread was short of it; the process goes on."""
    result_size = 64 if device == "cpu" else 0  # the device has memory of its own
    program = [sys.executable, "-c", PROGRAM, device, str(result_size + 20)]
    result = subprocess.run(
        program, env={**os.environ, "NPU_NUM_THREADS": "2"}, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "fine", result.stderr


PACKAGE = Path(__file__).parents[1]


def check_tiers(*tiers):
    """What the check that each build runs says of objects."""
    tools = [shutil.which(tool) for tool in ("nm", "objdump", "c++")]
    if None in tools or platform.machine() != "x86_64":
        pytest.skip("no x86_64, or no compiler with nm and objdump")
    return subprocess.run(
        [sys.executable, str(PACKAGE / "csrc" / "check_tiers.py"), *tiers], capture_output=True, text=True, check=False
    )


def test_tiers_share_no_symbol_and_narrow_ones_hold_no_wide_instruction():
    """An inline function compiled with wide instructions must not become the copy that baseline code calls."""
    folders = sorted(PACKAGE.glob("build/*/csrc/CMakeFiles"))
    if not folders:
        pytest.skip("the library was not built here; where it was, the build has run this check")
    tiers = {"baseline:": "_C"}
    tiers |= {f"{isa}:{','.join(npu_ops.native.instructions(isa))}": f"tier_{isa}" for isa in npu_ops.native.isas()}
    objects = {tier: sorted(map(str, folders[-1].glob(f"{name}.dir/**/*.o"))) for tier, name in tiers.items()}
    assert all(objects.values())
    result = check_tiers(*(f"{tier}={','.join(of)}" for tier, of in objects.items()))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("tier", "flags", "code", "found"),
    [
        ("avx2", "-mavx2", "namespace npu_ops::avx2 { int f() { return 1; } }", ""),
        ("avx2", "-mavx2", "struct S { int f(); }; inline int g() { return 1; } auto* p = &g;", "g() is no symbol of"),
        ("avx2", "-mavx2", "namespace npu_ops::avx512 { int f() { return 1; } }", "npu_ops::avx512::f() is no symbol"),
        (
            "scalar",
            "-mavx2",
            f"namespace npu_ops::scalar {{ {VECTORS} }}",
            "scalar: holds an instruction that it does not ask for",
        ),
        ("baseline", "-mavx512f", VECTORS, "baseline: holds an instruction that it does not ask for"),
        ("avx2", "-mavx512f", f"namespace npu_ops::avx2 {{ {VECTORS} }}", "%zmm"),
        ("avx512", "-mavx512f", f"namespace npu_ops::avx512 {{ {VECTORS} }}", ""),
        ("avx512", "-mavx512f", 'namespace npu_ops::avx512 { void f() { asm("tilerelease"); } }', "tilerelease"),
    ],
)
def test_the_check_finds_what_it_looks_for(tmp_path, tier, flags, code, found):
    source, built = tmp_path / "tier.cpp", tmp_path / "tier.o"
    source.write_text(code)
    compiler = shutil.which("c++") or pytest.skip("no compiler")
    subprocess.run([compiler, "-O2", "-std=c++20", flags, "-c", str(source), "-o", str(built)], check=True)
    asked = "" if tier == "baseline" else ",".join(npu_ops.native.instructions(tier))
    result = check_tiers(f"{tier}:{asked}={built}")
    assert found in result.stderr
    assert (result.returncode == 0) == (not found), result.stderr


def test_a_device_that_does_not_bind_ends_the_session_that_wants_it():
    """Otherwise every case on npu would be skipped, and the session green."""
    command = [sys.executable, "-m", "pytest", "-q", f"{__file__}::test_the_best_isa_is_the_default"]
    environ = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "NPU_REQUIRE_DEVICE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "NPU_REQUIRE_DEVICE=1, but npu-ops found no launch table" in done.stderr


def test_why_torch_refused_something_is_said() -> None:
    """The macro of torch's headers, for torch 2.10, says which call failed and no more."""
    many = torch.ones(64).expand(1 << 44, 64)  # of which no row has memory of its own
    with pytest.raises(RuntimeError, match=r"(?s)allocate.*This came of aoti_torch_empty_strided\("):
        torch.ops.npu_ops.silu_and_mul(many)
