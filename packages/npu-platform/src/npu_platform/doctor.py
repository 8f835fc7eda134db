"""``npu doctor``: traces every plugin decision of this environment, and names each problem with its remedy.

It works without vLLM and without the siblings, and it looks where vLLM looks: entry points, ``VLLM_PLUGINS``,
``npu_platform.activation``.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from npu_platform import activation, capabilities, config, numa
from npu_platform.errors import ConfigurationError
from npu_platform.memory_ledger import host_memory
from npu_platform.triton import availability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Finding", "examine", "run"]

GROUPS = ("torch.backends", "vllm.platform_plugins", "vllm.general_plugins", "vllm.stat_logger_plugins")
"""Entry-point groups in which the family registers; all but the first are filtered by ``VLLM_PLUGINS``."""

VARIABLES = "npu.environment_variables"
"""Entry-point group whose names are the environment variables that a sibling reads; nothing of it is loaded."""

FAMILY = ("npu-platform", "npu-ops", "npu-kvconnector", "npu-statlogger")
PYTHON_RANGE = ((3, 11), (3, 14))

_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""How names of variables end whose values belong into no report that somebody may send on."""

_INSTRUCTION_SETS = {
    "AVX2": {"avx2", "fma"},
    "AVX-512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "AVX-512-BF16": {"avx512_bf16"},
    "AMX": {"amx_tile", "amx_bf16", "amx_int8"},
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``ok`` False is a problem and then ``remedy`` says what to do."""

    section: str
    name: str
    detail: str
    ok: bool = True
    remedy: str | None = None


def run(*, as_json: bool, model: str | None = None, plan: Sequence[str] | None = None) -> int:
    """Print all findings, what a model's layers run, and what the ranks of a server would get (`plan`: its arguments).

    Return 0 when there is no problem, else 1.
    """
    findings = [*examine(), *(_guarded(partial(_layers, model)) if model else ())]
    findings += _guarded(partial(_plan, plan)) if plan is not None else ()
    problems = [finding for finding in findings if not finding.ok]
    if as_json:
        print(json.dumps({"healthy": not problems, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return 1 if problems else 0
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            print(f"\n{section}")
        print(f"  {'ok ' if finding.ok else 'NO '} {finding.name}: {finding.detail}")
    print(
        f"\n{len(problems)} problem{'' if len(problems) == 1 else 's'}" if problems else "\nHealthy: no problem found"
    )
    for problem in problems:
        print("\n  ".join([f"- {problem.detail}", *(problem.remedy or "").splitlines()]))
    return 1 if problems else 0


def examine() -> list[Finding]:
    """Look at everything, in the order in which a process meets it."""
    rooms: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions, _environment, _plugins, _platform, _processor, _devices, _ops,
    )  # fmt: skip
    return [finding for room in rooms for finding in _guarded(room)]


def _guarded(room: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A broken installation must not stop its own examination."""
    try:
        yield from room()
    except Exception as error:  # noqa: BLE001 whatever it is, it is a finding
        name = getattr(room, "func", room).__name__.strip("_")
        yield Finding(name, "examination", f"{type(error).__name__}: {error}", ok=False)


def _versions() -> Iterator[Finding]:
    section = "versions"
    low, high = PYTHON_RANGE
    python = platform.python_version()
    fits = low <= tuple(int(part) for part in python.split(".")[:2]) < high
    remedy = None if fits else f"Use Python {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}."
    yield Finding(section, "python", f"Python {python}", fits, remedy)
    yield _torch(activation.installed_version("torch"), activation.vllm_version())
    ours = activation.installed_version("npu-platform")
    for name in FAMILY:
        version = activation.installed_version(name)
        fits = version in (ours, None)
        detail = f"{name} {version}" if version else f"not installed (pip install 'npu-platform[{name[4:]}]')"
        remedy = None if fits else f"Install all four at one version: pip install 'npu-platform[all]=={ours}'"
        yield Finding(section, name, detail if fits else f"{detail} beside npu-platform {ours}", fits, remedy)


def _torch(torch: str | None, vllm: str | None) -> Finding:
    """Whether torch is of the series that the installed vLLM pins, or where there is none, of any that is supported."""
    pairs = activation.TORCH_OF_VLLM
    wanted = {pairs[_series(vllm)]} if vllm and _series(vllm) in pairs else set(pairs.values())
    fits = torch is not None and _series(torch) in wanted
    supported = " and ".join(f"vLLM {its} with torch {series}" for its, series in pairs.items())
    here = f"torch {torch or 'is missing'}" + (f" beside vLLM {vllm}" if vllm else "")
    remedy = None if fits else f"pip install 'torch=={max(wanted)}.*', and reinstall npu-platform for it"
    return Finding("versions", "torch", f"{here}; supported are {supported}", fits, remedy)


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _environment() -> Iterator[Finding]:
    values = config.variables_set()
    known = sorted({*config.ENVIRONMENT, *(point.name for point in importlib.metadata.entry_points(group=VARIABLES))})
    for name, its in values.items():
        value = "(set, not shown)" if name.endswith(_SECRETS) else its
        if name in known or not name.startswith("NPU_"):
            yield Finding("environment", name, value)
            continue
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]}? Otherwise unset it." if near else f"Unset it; there are {', '.join(known)}."
        detail = f"{name}={value} is without effect: no distribution that is installed here reads it."
        yield Finding("environment", name, detail, False, remedy)
    if not values:
        yield Finding("environment", "variables", "no NPU_*, VLLM_* or OMP_* variable is set")


def _plugins() -> Iterator[Finding]:
    section = "plugins"
    allowed = config.plugin_allow_list()
    missing = activation.missing_plugins()
    everything = [*(allowed or ()), *missing]
    if missing:
        detail = f"VLLM_PLUGINS={','.join(allowed or ())} leaves out {', '.join(missing)}."
        yield Finding(section, "VLLM_PLUGINS", detail, False, f"Set VLLM_PLUGINS={','.join(everything)} or unset it.")
    else:
        yield Finding(section, "VLLM_PLUGINS", "unset: all are loaded" if allowed is None else ",".join(allowed))
    for group in GROUPS:
        for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
            yield _plugin(point, allowed if group.startswith("vllm.") else None)


def _plugin(point: importlib.metadata.EntryPoint, allowed: list[str] | None) -> Finding:
    name = f"{point.group} {point.name}"
    origin = f"{point.value} from {point.dist.name} {point.dist.version}" if point.dist else point.value
    if allowed is not None and point.name not in allowed:
        return Finding("plugins", name, f"found, not allowed by VLLM_PLUGINS, so not loaded ({origin})")
    if activation.vllm_version() is None and point.group.startswith("vllm."):
        return Finding("plugins", name, f"found and allowed; not loaded, as vLLM is missing ({origin})")
    try:
        import torch  # noqa: F401 first, as in every process: it is torch that loads the group torch.backends

        point.load()
    except Exception as error:  # noqa: BLE001 vLLM skips a plugin that raises anything at import
        detail = f"plugin {point.name} ({origin}) cannot be imported: {type(error).__name__}: {error}"
        return Finding("plugins", name, detail, False, "If the message names no way out, reinstall that distribution.")
    return Finding("plugins", name, f"found, allowed, loaded ({origin})")


def _platform() -> Iterator[Finding]:
    section = "platform"
    decision = activation.decide()
    for check in decision.checks:
        yield Finding(section, check.name, check.detail, check.ok, check.remedy)
    others, allowed = _other_platforms(), config.plugin_allow_list()
    if others and (allowed is None or "npu" in allowed):
        names = ", ".join(others)
        remedy = "Set VLLM_PLUGINS so that it names one of them, uninstall the other, or set NPU_DEVICE=off."
        detail = f"A second platform plugin activates here as well ({names}); vLLM then refuses to start."
        yield Finding(section, "second platform", detail, not decision.activate, remedy)
    if not decision.activate:
        yield Finding(section, "winner", f"not npu: {decision.reason}")
    elif allowed is not None and "npu" not in allowed:
        yield Finding(section, "winner", "not npu: VLLM_PLUGINS does not name it")
    elif not others:
        yield Finding(section, "winner", f"npu, because {decision.reason}")
        yield Finding(section, "model runner", _model_runner())


def _model_runner() -> str:
    """Return which of vLLM's an engine would have; its configuration may ask for what V2 does not have."""
    why = availability.why_not_for_vllm() or availability.missing()
    v2 = config.asks_for_v2()
    if v2:
        return "vLLM's V2, as VLLM_USE_V2_MODEL_RUNNER says" + (f", which would be refused: {why}" if why else "")
    if v2 is not None:
        return "vLLM's V1, as VLLM_USE_V2_MODEL_RUNNER says"
    return f"vLLM's V1: {why}" if why else "vLLM's V2, or V1 for what V2 does not have"


def _other_platforms() -> list[str]:
    """Return the allowed platform plugins beside ours that say yes, as vLLM asks them."""
    allowed = config.plugin_allow_list()
    active = []
    for point in importlib.metadata.entry_points(group="vllm.platform_plugins"):
        if point.name == "npu" and point.value.startswith("npu_platform"):
            continue
        if allowed is None or point.name in allowed:
            try:
                if point.load()() is not None:
                    active.append(f"{point.name} from {point.dist.name if point.dist else point.value}")
            except Exception:  # noqa: BLE001, S112 vLLM takes an exception as a no; the plugin section shows it
                continue
    return active


def _processor() -> Iterator[Finding]:
    section = "processor"
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)$", info, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    name = model.group(1) if model else platform.machine()
    yield Finding(section, "cpu", f"{name}, {len(os.sched_getaffinity(0))} cores for this process")
    has = [name for name, needed in _INSTRUCTION_SETS.items() if needed <= present]
    lacks = [name for name in _INSTRUCTION_SETS if name not in has]
    detail = f"has {', '.join(has) or 'none of ours'}" + (f"; lacks {', '.join(lacks)}" if lacks else "")
    yield Finding(section, "instructions", detail)
    memories = [f"node {node} beside {len(its)} of the cores" for node, its in numa.nodes().items()]
    hint = "; a rank each: --tensor-parallel-size and --numa-bind" if len(memories) > 1 else ""
    yield Finding(section, "memory nodes", ", ".join(memories) + hint)


def _devices() -> Iterator[Finding]:
    import torch

    from npu_platform import info

    section = "devices"
    library = importlib.util.find_spec("npu_platform._C")
    yield Finding(
        section, "device library", library.origin if library and library.origin else "npu_platform._C not found"
    )
    if not hasattr(torch, "npu"):
        yield Finding(section, "devices", "none: PyTorch has no device npu (see platform)")
        return
    yield _capabilities()
    host, total = host_memory(), 0
    found = list(info.devices())
    try:
        config.require_devices(len(found))
    except ConfigurationError as error:
        yield Finding(section, "devices", str(error), ok=False)
        return
    for device in found:
        if device.driver == "simulator":  # whose memory is the host's
            total += device.memory_total
        gib = 2.0**30
        detail = (
            f"{device.name} (driver {device.driver}): {device.memory_total / gib:.1f} GiB, "
            f"{device.memory_free / gib:.1f} free, {device.memory_allocated / gib:.1f} allocated by this process"
        )
        yield Finding(section, f"npu:{device.index}", detail)
    fits = total <= host
    detail = f"host memory {host / 2**30:.1f} GiB, of which the devices may take {total / 2**30:.1f} GiB"
    detail += "; weights being loaded and a host tier of npu-kvconnector come on top"
    yield Finding(
        section, "memory", detail, fits, None if fits else "Lower NPU_SIMULATOR_MEMORY or NPU_SIMULATOR_DEVICES."
    )


def _capabilities() -> Finding:
    """What the device can do, by a vendor's package, which is imported."""
    package = None
    try:
        package = capabilities.package_of_device()
        said = capabilities.of_device()
    except Exception as error:  # noqa: BLE001 whatever an engine's start would end with
        remedy = None if package is None else f"Mend or remove {package}: no engine starts beside it."
        detail = str(error) if isinstance(error, ConfigurationError) else f"{package}: {type(error).__name__}: {error}"
        return Finding("devices", "capabilities", detail, False, remedy)
    differs = [field.name for field in fields(said) if getattr(said, field.name) != field.default]
    text = ", ".join(f"{name} {getattr(said, name)}" for name in differs) or "as the software NPU's"
    return Finding("devices", "capabilities", f"{text} (by {package})" if package else text)


def _ops() -> Iterator[Finding]:
    import torch

    from npu_platform import info

    allowed = config.plugin_allow_list()
    try:
        known = info.ops() if allowed is None or "npu_ops" in allowed else []
    except Exception as error:  # noqa: BLE001 the section "plugins" has named it as a problem
        yield Finding("ops", "npu-ops", f"could not be loaded: {error}")
        return
    if not known:
        yield Finding("ops", "npu-ops", "no ops registered: vLLM's plain-torch layers run, correct and slower")
    elif hasattr(torch.ops.npu_ops, "_isa"):
        isa, best = torch.ops.npu_ops._isa(), torch.ops.npu_ops._highest_isa()
        emulated = ", emulated in a build for tests" if torch.ops.npu_ops._isa_is_emulated() else ""
        products = torch.ops.npu_ops._product_isa()
        faster = "" if products == isa else f", for many rows {products}, which this processor multiplies faster in"
        detail = f"{isa}{emulated}{faster} (NPU_ISA; the best that this machine and this build have is {best})"
        yield Finding("ops", "kernels", detail)
    for op in known:
        yield Finding("ops", op.name, f"on npu: {op.npu}; on cpu: {op.cpu}")


def _plan(arguments: Sequence[str]) -> Iterator[Finding]:
    """What each rank would get that ``vllm serve`` starts here with these arguments."""
    import torch

    from npu_platform import plan

    ranks, count = plan.planned(plan.config_of(arguments)), torch.npu.device_count()
    for rank in ranks:
        there = rank.device < count
        remedy = None if there else f"Use fewer ranks; on the software NPU set NPU_SIMULATOR_DEVICES to {len(ranks)}."
        detail = rank.share() if there else f"needs npu:{rank.device}, but this process sees {count}"
        yield Finding("plan", rank.name(), detail, there, remedy)


def _layers(model: str) -> Iterator[Finding]:
    from npu_platform import implementations

    for kind in implementations.of_checkpoint(model):
        yield Finding("layers", f"{kind.count} x {kind.layer}", f"{kind.implementation} {kind.dtype}".rstrip())
