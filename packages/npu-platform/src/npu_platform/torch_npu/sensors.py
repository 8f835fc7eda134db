"""Owns what ``torch.npu`` measures of the hardware, which for the software NPU is the host's processor."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NoReturn

from npu_platform import _C

from .devices import Device, check_device, get_num_threads

__all__ = ["clock_rate", "power_draw", "temperature", "utilization"]

_ENERGY = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
_ENERGY_RANGE = _ENERGY.with_name("max_energy_range_uj")
_SAMPLE = 0.1  # seconds
_PROCESSOR_ZONES = ("x86_pkg_temp", "k10temp", "coretemp", "cpu")


def utilization(device: Device = None) -> int:
    """Return in percent how busy this process kept the cores of the device for a tenth of a second from now on."""
    _check_sensors(device)
    wall, processor = time.perf_counter(), time.process_time()
    time.sleep(_SAMPLE)
    busy = (time.process_time() - processor) / (time.perf_counter() - wall)
    return round(100 * min(1.0, busy / get_num_threads()))


def temperature(device: Device = None) -> int:
    """Return the temperature of the host's processor in degrees Celsius.

    Raises:
        RuntimeError: the host does not show one, as most virtual machines.
    """
    _check_sensors(device)
    for zone in sorted(Path("/sys/class/thermal").glob("thermal_zone*")):
        if (zone / "type").read_text().strip().startswith(_PROCESSOR_ZONES):
            return round(int((zone / "temp").read_text()) / 1000)
    return _refuse("temperature of its processor", "/sys/class/thermal")


def power_draw(device: Device = None) -> int:
    """Return the power that the host's processor drew for a tenth of a second from now on, in milliwatts.

    Raises:
        RuntimeError: the host does not show the energy, or to the superuser alone.
    """
    _check_sensors(device)
    if not os.access(_ENERGY, os.R_OK):
        _refuse("energy that its processor takes", str(_ENERGY))
    began, energy = time.perf_counter(), int(_ENERGY.read_text())
    time.sleep(_SAMPLE)
    taken = (int(_ENERGY.read_text()) - energy) % int(_ENERGY_RANGE.read_text())
    return round(taken / (time.perf_counter() - began) / 1000)


def clock_rate(device: Device = None) -> int:
    """Return the clock of the host's fastest core in MHz.

    Raises:
        RuntimeError: the host does not show one.
    """
    _check_sensors(device)
    clocks = re.findall(r"^cpu MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return round(max(map(float, clocks))) if clocks else _refuse("clock of its cores", "/proc/cpuinfo")


def _check_sensors(device: Device) -> None:
    """Raise RuntimeError for a device that is not there, or not this host's processor."""
    check_device(device)
    if _C.driver_name() != "simulator":
        msg = f"the npu driver {_C.driver_name()!r} has no sensors"
        raise RuntimeError(msg)


def _refuse(what: str, place: str) -> NoReturn:
    msg = f"the software NPU is this host's processor, and the host does not show the {what} in {place}"
    raise RuntimeError(msg)
