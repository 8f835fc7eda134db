"""Which machine measured: its processor, cores, memory, kernels and load, and the name of its pages."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

# Names of AMD's generations by family and, in hexadecimal, model.
GENERATIONS = (
    (23, range(0x30), "Zen"),
    (23, range(0x30, 0x100), "Zen 2"),
    (25, range(0x10, 0x20), "Zen 4"),
    (25, range(0x60, 0xB0), "Zen 4"),
    (25, range(0x100), "Zen 3"),
    (26, range(0x100), "Zen 5"),
)
# Where the generation is hidden or not known here.
BRANDS = ("Xeon", "EPYC", "Ryzen", "Core")
# What decides which kernels a processor can run, from the newest on.
EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "fma")


def facts() -> dict[str, Any]:
    """Return what a table of figures must say about the machine, as JSON."""
    fields = processor()
    return {
        "name": name(),
        "processor": description(),
        "cores": len(os.sched_getaffinity(0)),
        "extensions": [each for each in EXTENSIONS if each in fields.get("flags", "").split()],
        "cache": fields.get("cache size", "unknown"),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "virtual": "hypervisor" in fields.get("flags", "").split(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": commit(),
        "load": round(os.getloadavg()[0], 2),
    }


def machine() -> str:
    """Return the processor, its cores that this process may use, and the load before the run, as a sentence's part."""
    return f"{description()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


def name() -> str:
    """Return the folder of the machine's pages: the processor's generation or brand, and its best instruction set."""
    tier = next((each for each in EXTENSIONS if each in processor().get("flags", "").split()), platform.machine())
    brand = next((each for each in BRANDS if each in processor().get("model name", "")), "cpu")
    return re.sub(r"[^a-z0-9_]+", "-", f"{generation() or brand} {tier}".lower()).strip("-")


def description() -> str:
    """Return the model's name, with the generation where the name does not tell it (a virtual machine hides it)."""
    model = processor().get("model name", platform.machine())
    return f"{model} ({generation()})" if generation() else model


def generation() -> str:
    """Return the name of an AMD processor's generation; empty for others, whose model names tell it."""
    fields = processor()
    if fields.get("vendor_id") != "AuthenticAMD":
        return ""
    family, model = int(fields["cpu family"]), int(fields["model"])
    return next((label for its, models, label in GENERATIONS if its == family and model in models), "")


def processor() -> dict[str, str]:
    """Return what Linux says about the first processor."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def commit() -> str:
    """Return the commit that was measured, marked where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"
