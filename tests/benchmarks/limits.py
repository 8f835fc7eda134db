"""What the machine itself can do at this moment: bytes read from memory and operations in registers a second."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

SECONDS = 0.3  # of each measurement


class Limits:
    """The program ``machine_limits.cpp``, compiled for this machine, on all cores."""

    def __init__(self, folder: Path) -> None:
        """Compile and start it."""
        threads = str(len(os.sched_getaffinity(0)))
        self.process = subprocess.Popen(
            [compiled(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": threads},
        )

    def measured(self) -> dict[str, float]:
        """Return GB/s read from memory, at the best number of streams a thread, and GF/s of fused multiply-adds."""
        return {"dram_gb_s": round(1e-9 / self.time("dram"), 2), "fma_gf_s": round(1e-9 / self.time("fma"), 1)}

    def usual_memory(self) -> float:
        """Return the GB/s of the median sample, at the best number of streams a thread: what a step's median goes beside."""
        return round(1e-9 / self.time("dram", "median"), 2)

    def time(self, what: str, which: str = "best") -> float:
        """Return the seconds of one byte or of one operation, of the best sample or of the median one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {SECONDS} {which}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline().removeprefix("RESULT "))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compiled(folder: Path | str) -> str:
    """Return the path of the program."""
    source, program = Path(__file__).with_name("machine_limits.cpp"), str(Path(folder) / "machine_limits")
    flags = ["-O3", "-march=native", "-std=c++20", "-pthread"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, str(source), "-o", program], check=True)
    return program
