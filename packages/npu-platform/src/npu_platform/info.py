"""``npu info``: the devices, their memory, and which implementation runs each op of ``torch.ops.npu_ops``."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from npu_platform import config, implementations

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Device",
    "InstructionSet",
    "LinearChoices",
    "Op",
    "devices",
    "instruction_sets",
    "linear_choices",
    "ops",
    "registered_ops",
    "run",
]


DEMO_MODEL = files("npu_platform.demo") / "model"


@dataclass(frozen=True)
class Device:
    """One npu device; memory in bytes."""

    index: int
    name: str
    driver: str
    threads: int
    memory_total: int
    memory_free: int
    memory_allocated: int


@dataclass(frozen=True)
class Op:
    """One op, and what runs it when its tensors are on npu and on cpu."""

    name: str
    npu: str
    cpu: str


@dataclass(frozen=True)
class LinearChoices:
    """File of the choices between npu-ops' linear and torch's, and how many it has: shapes by numbers of rows."""

    path: str
    entries: int


@dataclass(frozen=True)
class InstructionSet:
    """One that npu-ops has kernels for: what a processor must have, where its kernels were timed, what it is here."""

    name: str
    instructions: str
    timed_on: str | None
    here: str


def run(*, as_json: bool, model: str | None = None) -> int:
    """Print devices and ops, and for a model (empty: the demo's) what its layers run.

    Return 0, or 1 when PyTorch has no device npu, a setting is wrong, or the model does not load.
    """
    try:
        found = list(devices())
        config.require_devices(len(found))
        known = ops()
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"{error} Run `npu doctor` to see why.", file=sys.stderr)
        return 1
    try:
        layers = None if model is None else implementations.of_checkpoint(model or str(DEMO_MODEL))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    measured, sets = linear_choices(), instruction_sets()
    if as_json:
        shown: dict[str, Any] = {"devices": [asdict(d) for d in found], "ops": [asdict(op) for op in known]}
        shown |= {} if layers is None else {"layers": [asdict(kind) for kind in layers]}
        shown |= {"instruction_sets": [asdict(each) for each in sets]} if sets else {}
        shown |= {} if measured is None else {"linear_choices": asdict(measured)}
        print(json.dumps(shown, indent=2))
        return 0
    for line in implementations.text(layers or []):
        print(line)
    for device in found:
        print(f"npu:{device.index}  {device.name}, driver {device.driver}, {device.threads} threads, {_memory(device)}")
    if not known:
        print("No ops: npu-ops is not installed, so vLLM's plain-torch layers run (pip install 'npu-platform[ops]')")
    width = max((len(op.name) for op in known), default=0)
    for op in known:
        print(f"{op.name:{width}}  npu: {op.npu}; cpu: {op.cpu}")
    for each in sets:
        print(f"kernels {each.name}: {each.here}; timed on {each.timed_on or 'no processor yet'}")
    if measured is not None:
        print(f"npu_ops::linear or torch's: {measured.entries} shapes and numbers of rows measured, in {measured.path}")
    return 0


def devices() -> Iterator[Device]:
    """Yield the npu devices of this process. Raises RuntimeError when PyTorch has none, ImportError without PyTorch."""
    import torch

    npu: Any = getattr(torch, "npu", None)
    if npu is None:
        msg = "PyTorch has no device npu: the device library did not load."
        raise RuntimeError(msg)
    for index in range(npu.device_count()):
        free, total = npu.mem_get_info(index)
        properties = npu.get_device_properties(index)
        threads = properties.multi_processor_count
        yield Device(index, properties.name, properties.driver, threads, total, free, npu.memory_allocated(index))


def ops() -> list[Op]:
    """Return the ops that npu-ops registers, after importing it; none when it is not installed."""
    for point in importlib.metadata.entry_points(group="vllm.general_plugins", name="npu_ops"):
        point.load()  # siblings meet through entry points, not imports
    return registered_ops()


def registered_ops() -> list[Op]:
    """Return the ops of ``torch.ops.npu_ops`` in this process as it is."""
    import torch

    names = sorted(
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("npu_ops::") and "::_" not in name
    )
    return [Op(name, _implementation(name, "PrivateUse1"), _implementation(name, "CPU")) for name in names]


def instruction_sets() -> list[InstructionSet]:
    """Return the instruction sets of npu-ops' kernels, the plainest first; none without npu-ops."""
    import torch

    native = torch.ops.npu_ops
    names = native._isas().split() if hasattr(native, "_isas") else []

    def here(name: str) -> str:
        if name == native._isa():
            return "in use"
        if name == native._product_isa():
            return "in use for many rows"
        return "can run" if native._can_run_isa(name) else "cannot run"

    return [
        InstructionSet(name, native._instructions_of_isa(name), native._isa_timed_on(name) or None, here(name))
        for name in names
    ]


def linear_choices() -> LinearChoices | None:
    """Return where npu-ops keeps its choices of linear layers, and how many; None without npu-ops."""
    import torch

    op = getattr(torch.ops.npu_ops, "_linear_choices", None)
    return None if op is None else LinearChoices(*op())


def _implementation(op: str, key: str) -> str:
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(op, key):
        return "native kernel"
    if has_kernel(op, "CompositeExplicitAutograd") or has_kernel(op, "CompositeImplicitAutograd"):
        return "reference in torch ops"
    return "CPU kernel on aliases of device memory" if key == "PrivateUse1" and has_kernel(op, "CPU") else "none"


def _memory(device: Device) -> str:
    return f"{device.memory_free / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB free"
