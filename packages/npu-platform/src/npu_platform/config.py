"""The settings of npu-platform: ``--additional-config '{"npu": {...}}'`` and the ``NPU_*`` variables.

This module is the only Python reader of the environment in this distribution. The variables that belong to the
software NPU itself (``NPU_SIMULATOR_DEVICES``, ``NPU_SIMULATOR_MEMORY``, ``NPU_VISIBLE_DEVICES``,
``NPU_NUM_THREADS``, ``NPU_FALLBACK``, ``NPU_DEBUG``, ``NPU_HUGE_PAGES``) are read by the device library, once, at
its first use; they are listed here because ``npu doctor`` and the documentation are made from this list.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from npu_platform.errors import ConfigurationError

ENVIRONMENT: dict[str, str] = {
    "NPU_DEVICE": "auto (default): the platform activates unless another accelerator is present; "
    "simulator: always, on the software NPU; null, or null:launch=5us: always, on a device that computes nothing; "
    "/path/to/driver.so: always, on a vendor's driver; off: never",
    "NPU_SIMULATOR_DEVICES": "number of software or null NPUs in a process (default 1)",
    "NPU_SIMULATOR_MEMORY": "memory of one software or null NPU, for example 8GiB (default: 80 % of the host's, "
    "shared evenly)",
    "NPU_VISIBLE_DEVICES": "comma list of device ordinals that this process may use (default: all; empty: none)",
    "NPU_NUM_THREADS": "threads of the device's kernels (default: the cores that this process may use)",
    "NPU_FALLBACK": "silent (default), warn or error: what to do when an op has no npu kernel and runs its CPU kernel",
    "NPU_DEBUG": "comma list of memory (or 1: find accesses outside kernels and tensors) and of faults on demand, "
    "such as oom@37, kernel=aten::mm@5, lost@100, bitflip@12:seed=7, slow=2ms, slow_link=200us",
    "NPU_HUGE_PAGES": "0: do not ask for huge pages (default 1)",
}
"""Every environment variable that npu-platform knows, with its meaning."""

_DRIVERS = ("simulator", "null")  # those that are built in
_RUNNER, _BACKEND = "VLLM_USE_V2_MODEL_RUNNER", "TRITON_DEFAULT_BACKEND"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_why_runner: str | None = None
_CHOSEN = "_NPU_CHOSEN"  # the variables of the environment that stand for what was chosen, not for what the user said


@dataclass(frozen=True, kw_only=True, slots=True)
class NPUConfig:
    """Settings of one engine, from the key ``npu`` of vLLM's ``--additional-config``."""

    num_threads: int | None = None
    """Threads of the device's kernels in each worker; None: the cores of this process shared evenly by its ranks."""
    sampler: Literal["npu_ops", "torch"] = "npu_ops"
    """Top-k and top-p filter: npu-ops' own when it is installed, or vLLM's plain-torch one."""
    sleep_folder: str | None = None
    """Where sleep mode keeps what it will need again, in files without a name; None: in the host's memory."""
    stopped_seconds: int | None = 5
    """After so long a process that is stopped (SIGSTOP) is ended, and with it its engine; so is an engine whose program
    or server is gone, and after three times as long one of several hosts that hears nothing of another. None: they are
    waited for."""

    def __post_init__(self) -> None:
        """Refuse values outside the rules."""
        threads = self.num_threads
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            msg = (
                f"npu.num_threads must be a whole number of at least 1, not {threads!r}; leave it out for the default."
            )
            raise ConfigurationError(msg)
        stopped = self.stopped_seconds
        if stopped is not None and (not isinstance(stopped, int) or isinstance(stopped, bool) or stopped < 1):
            msg = (
                f"npu.stopped_seconds must be a whole number of at least 1, not {stopped!r}; null waits without an end."
            )
            raise ConfigurationError(msg)
        if self.sampler not in ("npu_ops", "torch"):
            msg = f"npu.sampler must be 'npu_ops' or 'torch', not {self.sampler!r}."
            raise ConfigurationError(msg)
        folder = self.sleep_folder
        if folder is not None and not (isinstance(folder, str) and os.access(folder, os.W_OK | os.X_OK)):
            msg = f"npu.sleep_folder must be a folder that can be written to, not {folder!r}; leave it out for memory."
            raise ConfigurationError(msg)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> NPUConfig:
        """Parse vLLM's ``additional_config``; keys beside ``npu`` belong to others and are left alone.

        Raises ConfigurationError for a section that is not a table, an unknown key or a bad value.
        """
        section = additional_config.get("npu", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(section, Mapping):
            msg = f"additional_config['npu'] must be a table of settings, not {section!r}."
            raise ConfigurationError(msg)
        known = [field.name for field in fields(cls)]
        for key in section:
            if key not in known:
                msg = f"additional_config['npu'] has no setting {key!r}; {_nearest(str(key), known)}"
                raise ConfigurationError(msg)
        return cls(**section)


def checks_memory() -> bool:
    """Whether ``NPU_DEBUG`` asks for memory that kernels alone can reach."""
    return not {"1", "memory"}.isdisjoint(os.environ.get("NPU_DEBUG", "").split(","))


def require_devices(count: int) -> None:
    """Raise ConfigurationError where this process sees no device; `count`: how many it sees."""
    if count:
        return
    visible = os.environ.get("NPU_VISIBLE_DEVICES")
    msg = (
        "The driver has no npu device for this process; see its own log, or set NPU_DEVICE=simulator."
        if visible is None
        else f"NPU_VISIBLE_DEVICES must name a device, not {visible!r}, which hides all; unset it to use all."
    )
    raise ConfigurationError(msg)


def device_choice(environ: Mapping[str, str] | None = None) -> str:
    """Return what ``NPU_DEVICE`` asks for: auto, off, simulator, null or the path of a driver, without options.

    The options, after a colon, are the driver's to read. Raises ConfigurationError for a value that is none of them.
    """
    environ = os.environ if environ is None else environ
    value = environ.get("NPU_DEVICE", "auto")
    name, _, options = value.partition(":")
    if "/" in name:
        return name
    choice = name.lower() or "auto"
    if choice not in ("auto", "off", *_DRIVERS) or (options and choice not in _DRIVERS):
        msg = (
            f"NPU_DEVICE must be auto, simulator, null, off or the path of a driver, not {value!r}; unset it for auto."
        )
        raise ConfigurationError(msg)
    return choice


def is_forced(choice: str) -> bool:
    """Say whether this choice takes the device whatever other accelerators are present."""
    return choice not in ("auto", "off")


def is_of_a_vendor(choice: str) -> bool:
    """Say whether this choice is the path of a vendor's driver."""
    return "/" in choice


def is_built_in(driver: str) -> bool:
    """Say whether this driver is one of ours, whose devices go on in a forked process."""
    return driver in _DRIVERS


def plugin_allow_list(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the names in ``VLLM_PLUGINS``, or None when it is unset and every plugin is loaded."""
    environ = os.environ if environ is None else environ
    value = environ.get("VLLM_PLUGINS")
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


def vllm_target_device(environ: Mapping[str, str] | None = None) -> str | None:
    """Return ``VLLM_TARGET_DEVICE``: at run time, the value ``cpu`` makes vLLM skip every platform plugin."""
    environ = os.environ if environ is None else environ
    return environ.get("VLLM_TARGET_DEVICE")


def variables_set(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables in the environment that bear on this family: ``NPU_*``, and those of vLLM and OpenMP."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(environ) if name.startswith(("NPU_", "VLLM_", "OMP_"))}


def prepare_child_environment() -> None:
    """Set what spawned engine and worker processes must find before their libraries load; what the user set stays.

    OpenMP threads of torch's CPU kernels otherwise spin at barriers, which costs a factor of ten as soon as a
    neighbour takes a core; libgomp reads the policy only once, when it is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def cxx_compiler() -> str | None:
    """Return the path of the C++ compiler of Triton kernels: what ``CXX`` names, or g++ or c++; None: there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["g++", "c++"])), None)


def asks_for_triton() -> bool | None:
    """Say whether the user wants vLLM's Triton kernels, by Triton's variable or by vLLM's; None: neither is set."""
    said = _said_of_runner()
    if said.get(_BACKEND) == "npu" or asks_for_v2():
        return True
    return False if said else None


def what_leaves_triton_out() -> str:
    """Return the variables by which :func:`asks_for_triton` says no, with their values."""
    return " and ".join(f"{name}={value}" for name, value in _said_of_runner().items())


def asks_for_v2() -> bool | None:
    """Say whether the user wants vLLM's V2 model runner; None: nothing is said, whatever was chosen."""
    said = _said_of_runner().get(_RUNNER)
    return None if said is None else said.strip() not in ("", "0")


def chose_v2_runner() -> bool:
    """Say whether vLLM's V2 model runner is chosen, by the user or for this engine."""
    return os.environ.get(_RUNNER, "").strip() not in ("", "0")


def begin_choice_of_runner() -> None:
    """Forget what was chosen for an engine before, here or in the program that started this one.

    What the user set stays. An engine's own processes begin no choice, or, as vLLM's API servers, the same once more.
    """
    global _why_runner
    chosen = _chosen()
    for name in (_RUNNER, _BACKEND):
        if name in chosen and os.environ.get(name) == chosen.pop(name):
            del os.environ[name]
    os.environ[_CHOSEN] = json.dumps(chosen)
    _why_runner = None


def is_runner_open() -> bool:
    """Say whether neither the user nor npu has chosen a runner."""
    return _RUNNER not in os.environ


def choose_runner(*, v2: bool, why: str, triton: bool = False) -> None:
    """Choose the runner for this process and those that it starts, until the next engine's choice begins.

    `triton`: vLLM has its Triton kernels in this process, and is to have them in those as well, on either runner.
    """
    global _why_runner
    _why_runner = why
    chosen = {_RUNNER: str(int(v2))} | ({_BACKEND: "npu"} if triton and not os.environ.get(_BACKEND) else {})
    _choose(chosen)


def why_this_runner() -> str:
    """Return why the runner is the one that it is, where it is not open."""
    chosen = os.environ.get(_RUNNER)
    if chosen is not None and chosen == _chosen().get(_RUNNER):
        return _why_runner or "so its engine was configured"
    return "the default" if chosen is None else f"{_RUNNER}={chosen}"


def use_forked_workers() -> None:
    """Make vLLM fork its engine processes, which ``vllm serve`` would otherwise spawn, unless the user chose."""
    if _METHOD not in os.environ:
        _choose({_METHOD: "fork"})


def use_spawned_workers() -> None:
    """Make vLLM spawn its engine processes after all, unless the user chose."""
    if os.environ.get(_METHOD) in (None, _chosen().get(_METHOD)):
        _choose({_METHOD: "spawn"})


def forks_workers() -> bool:
    """Say whether vLLM forks its engine processes, by the user's choice or by ours."""
    return os.environ.get(_METHOD) == "fork"


def offer_devices_to_ray(count: int) -> None:
    """Let a Ray that vLLM starts on this host have `count` NPUs, unless the user says what it has.

    It finds the devices of other makers only, and an engine would wait for its ranks' devices for ever. A Ray that runs
    already has what it was started with.
    """
    os.environ.setdefault("RAY_OVERRIDE_RESOURCES", json.dumps({"NPU": count}))


def _said_of_runner() -> dict[str, str]:
    """Return what the user set of the two variables; in a rank that Ray started, what was chosen for it as well."""
    values, chosen = ((name, os.environ.get(name)) for name in (_RUNNER, _BACKEND)), _chosen()
    return {name: value for name, value in values if value and value != chosen.get(name)}


def _choose(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    os.environ[_CHOSEN] = json.dumps(_chosen() | variables)


def _chosen() -> dict[str, str]:
    """Return the variables that were chosen for an engine, of this process or of one that started it."""
    chosen: dict[str, str] = json.loads(os.environ.get(_CHOSEN, "{}"))
    return chosen


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(known)}."
