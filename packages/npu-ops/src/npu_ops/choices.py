"""Owns the choice between our linear and torch's (oneDNN): measured once a shape, kept in a file, told to the kernels.

A shape is measured for numbers of rows that are powers of two; other numbers take the next one, larger ones the last.
The file, one for each kind of machine, lies in vLLM's cache directory; it may be removed at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_ops import native
from npu_ops.config import OpsConfig
from npu_ops.other_work import OtherWork

__all__ = ["machine", "measure", "path", "shapes", "summary"]

_LIBRARY = torch.library.Library("npu_ops", "FRAGMENT")
_LIBRARY.define("_linear_choices() -> (str, int)")  # by which npu-platform shows it

logger = logging.getLogger("vllm.npu_ops")

SECONDS = 2.0
"""What one call of `measure` may take; shapes that are left keep the tier's rule until the next start."""
MOST_ROWS = 512
GAIN = 0.95
"""Torch's is chosen when it takes at most this part of our time: what noise decides stays with us."""
HOPELESS = 3.0
"""From COMPUTING rows on, one that takes so many times as long is not tried with more rows."""
COMPUTING = 32
ALLOWANCE = 0.02  # seconds of a first call that torch may spend on making a kernel
OPERATIONS = 2.5e8  # of one product, for each thread: larger weights are measured by some of their rows
BYTES = 64 << 20  # the same
ENOUGH = 0.01  # seconds: a pair of times is taken again until they are spent, MOST_PAIRS times at most
MOST_PAIRS = 9

Shape = dict[str, dict[str, Any]]  # of a number of rows: {"linear": "npu" or "torch", "npu_us": ..., "torch_us": ...}


def measure(weights: Sequence[Tensor], rows: int) -> None:
    """Measure what is not known yet of linear layers with these weights and up to `rows` rows, and tell the kernels.

    weights: [N, K] each, on one device, float32, bfloat16 or float16. Takes SECONDS at most, and nothing where all is
    in the file, the kernels are missing, in batch-invariant mode, or with NPU_TUNE=0. While other work takes part of
    the processors nothing is chosen: what that slows by half would be chosen against for good.
    """
    if not (weights and native.available() and OpsConfig.from_environment().tune) or native.batch_invariant():
        return
    end = time.monotonic() + SECONDS
    key = machine(weights[0].device)
    alike: dict[str, list[Tensor]] = defaultdict(list)
    for weight in weights:
        alike[_name(weight)].append(weight)
    kept = shapes(key)
    known = {name: kept.get(name, {}) for name in alike}
    wanted = {name: [m for m in _buckets(rows) if str(m) not in found] for name, found in known.items()}
    missing = [name for name, buckets in wanted.items() if buckets]
    others, threads = OtherWork(), max(key["threads"])
    new: dict[str, Shape] = {}
    with torch.inference_mode():
        for name in missing:
            if time.monotonic() < end and not others.disturbs(threads):
                new[name] = known[name] | _measured(alike[name], wanted[name], end)
    if new and others.disturbs(threads):
        new = {}
        taken = f"{others.seconds:.1f} s of the processors"
        logger.info("npu-ops has not measured linear layers of %s: others took %s meanwhile", ", ".join(missing), taken)
    for name, found in (known | new).items():
        _tell(alike[name][0], found)
    if new:
        _write(key, new)
        took = time.monotonic() - end + SECONDS
        logger.info("npu-ops measured %d shapes of linear layers in %.1f s: %s", len(new), took, path(key))


def machine(device: torch.device) -> dict[str, Any]:
    """Return what a measurement holds for: processor, device, threads, instruction set, versions, the build."""
    from importlib.metadata import version

    where = device.type
    threads = [torch.get_num_threads()]
    if device.type == "npu":
        npu: Any = torch.npu  # type: ignore[attr-defined]
        where = f"{npu.get_device_name(device)}, {npu.get_device_properties(device).driver}"
        threads.append(npu.get_num_threads())
    return {
        "processor": _processor(),
        "device": where,
        "threads": threads,
        "isa": native.isa(),
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "npu_ops": f"{version('npu-ops')}, {native.digest()}",
    }


def path(key: dict[str, Any]) -> Path:
    """Return the file for this machine."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return OpsConfig.from_environment().cache / "npu_ops" / f"linear-{digest[:12]}.json"


def shapes(key: dict[str, Any]) -> dict[str, Shape]:
    """Return what the file knows; nothing, with a warning, when it cannot be read or is another machine's."""
    file = path(key)
    try:
        content = json.loads(file.read_text())
        if content["machine"] == key and all(_is_shape(shape) for shape in content["shapes"].values()):
            return content["shapes"]
        problem = "it is of another machine or form"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = repr(error)
    logger.warning("npu-ops measures linear layers anew, because %s cannot be used: %s", file, problem)
    return {}


def summary() -> tuple[str, int]:
    """Return the file for the default device, and how many choices (shapes by numbers of rows) it has."""
    npu = getattr(torch, "npu", None)
    key = machine(torch.device("npu", 0) if npu is not None and npu.device_count() else torch.device("cpu"))
    return str(path(key)), sum(map(len, shapes(key).values()))


_LIBRARY.impl("_linear_choices", summary, "CompositeExplicitAutograd")


def _buckets(rows: int) -> Iterator[int]:
    m = 1
    yield m
    while m < min(rows, MOST_ROWS):
        m *= 2
        yield m


def _name(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} {weight.shape[0]}x{weight.shape[1]}"


def _tell(weight: Tensor, found: Shape) -> None:
    bits = {int(m).bit_length() - 1: entry["linear"] == "torch" for m, entry in found.items()}
    torchs = sum(1 << bit for bit, is_torch in bits.items() if is_torch)
    torch.ops.npu_ops._choose_linear(weight, *weight.shape, sum(1 << bit for bit in bits), torchs)


def _measured(weights: list[Tensor], buckets: list[int], end: float) -> Shape:
    found: Shape = {}
    given_up: str | None = None  # who is not tried any more
    for m in buckets:
        if time.monotonic() > end:
            break
        if given_up is not None:
            found[str(m)] = {"linear": "npu" if given_up == "torch" else "torch"}
            continue
        ours, torchs = (round(seconds * 1e6, 1) for seconds in _times(weights, m))
        found[str(m)] = {
            "linear": "torch" if torchs < GAIN * ours else "npu",
            "npu_us": ours,
            "torch_us": torchs,
        }
        if m >= COMPUTING and max(ours, torchs) > HOPELESS * min(ours, torchs):
            given_up = "torch" if torchs > ours else "npu"
    return found


def _times(weights: list[Tensor], m: int) -> tuple[float, float]:
    """Seconds of our linear and of torch's with m rows, in turns, each on other weights: the caches are cold."""
    n, k = weights[0].shape
    operations = OPERATIONS * torch.get_num_threads()
    part = min(n, max(64, int(min(operations / (2 * m * k), BYTES / (k * weights[0].element_size())))))
    x = weights[0].new_ones(m, k)
    calls = 0

    def timed(linear: Callable[..., Tensor]) -> float:
        nonlocal calls
        first = calls * part % (n - part + 1)
        weight = weights[calls % len(weights)][first : first + part]
        calls += 1
        begin = time.perf_counter()
        linear(x, weight, None)
        if weight.device.type != "cpu":
            torch.accelerator.synchronize(weight.device)
        return time.perf_counter() - begin

    with _only_ours(weights[0], part, k):
        ours, torchs = torch.ops.npu_ops.linear, torch.nn.functional.linear
        timed(ours)
        first = timed(ours), timed(torchs)
        if first[1] > HOPELESS * first[0] + ALLOWANCE:
            return first
        pairs = [(timed(ours), timed(torchs))]
        while len(pairs) < 3 or (len(pairs) < MOST_PAIRS and sum(map(sum, pairs)) < ENOUGH):
            pairs.append((timed(ours), timed(torchs)))
    # the least: what disturbs a call only adds to it
    return min(a for a, _ in pairs), min(b for _, b in pairs)


@contextlib.contextmanager
def _only_ours(weight: Tensor, n: int, k: int) -> Iterator[None]:
    choose = torch.ops.npu_ops._choose_linear
    choose(weight, n, k, 0xFFFF, 0)
    try:
        yield
    finally:
        choose(weight, n, k, 0, 0)


def _is_shape(shape: Any) -> bool:
    return all(int(m).bit_count() == 1 and entry["linear"] in ("npu", "torch") for m, entry in shape.items())


def _write(key: dict[str, Any], new: dict[str, Shape]) -> None:
    """Add to the file; other processes that do the same at this moment wait for each other. Failure is a warning."""
    file = path(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = {"machine": key, "shapes": shapes(key) | new}
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as written:
                json.dump(content, written, indent=1)
            os.replace(written.name, file)  # noqa: PTH105 - a reader sees the old file or the new one
    except OSError as error:
        logger.warning("npu-ops could not keep its choices of linear layers: %s", error)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    import platform

    return platform.processor() or platform.machine()
