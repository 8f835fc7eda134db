"""What knows no torch (the simulator, what graphs record, how ranks share memory) under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
DEVICES = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "64MiB", "NPU_NUM_THREADS": "2"}
# A forked child starts threads, which ThreadSanitizer gives up on unless told to go on.
OPTIONS = {"TSAN_OPTIONS": "die_after_fork=0"}


ENVIRONMENT = [*CSRC.glob("config/*.cpp"), *CSRC.glob("faults/*.cpp")]
RECORDING = [
    CSRC / "runtime" / "recording.cpp",
    CSRC / "runtime" / "capture_streams.cpp",
    Path(__file__).with_name("recording_test.cpp"),
]
PARTS = {
    "simulator": sorted([*CSRC.glob("simulator/*.cpp"), *CSRC.glob("null_device/*.cpp"), *ENVIRONMENT, *RECORDING]),
    "thread_pool": [CSRC / "simulator" / "thread_pool.cpp", CSRC / "config" / "processors.cpp"],
    "shared_segment": [
        *(CSRC / "distributed" / name for name in ("shared_segment.cpp", "copies.cpp", "in_order.cpp")),
        CSRC / "config" / "processors.cpp",
    ],
}


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitized(part: str, sanitizers: str, tmp_path: Path) -> None:
    program = tmp_path / part
    sources = [*PARTS[part], Path(__file__).with_name(f"{part}_test.cpp")]
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-pthread",
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
        f"-I{CSRC}",
    ]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True, timeout=300)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NPU_")}
    done = subprocess.run(
        [str(program)], env=environ | DEVICES | OPTIONS, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "all well\n"
