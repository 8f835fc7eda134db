"""What torch.npu measures is that of the host, or an error that says what the host does not show."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from npu_platform.torch_npu import sensors


def test_utilization_rises_with_work() -> None:
    x = torch.randn(512, 512, device="npu")
    threads = torch.npu.get_num_threads()
    torch.npu.set_num_threads(1)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            x @ x

    idle = torch.npu.utilization()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        busy = max(torch.npu.utilization() for _ in range(20))
    finally:
        stop.set()
        thread.join()
        torch.npu.set_num_threads(threads)
    assert 0 <= idle < busy <= 100


def test_clock_rate_is_that_of_a_processor() -> None:
    assert 100 < torch.npu.clock_rate() < 10_000


@pytest.mark.parametrize("sensor", ["temperature", "power_draw"])
def test_a_sensor_reads_or_says_where_it_looked(sensor: str) -> None:
    refusal = None
    try:
        value = getattr(torch.npu, sensor)()
    except RuntimeError as error:  # by machine, both outcomes are right
        refusal = str(error)
    assert value > 0 if refusal is None else re.search("the host does not show the .* in /sys/class", refusal)


def test_power_is_the_energy_over_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    energy, span = tmp_path / "energy_uj", tmp_path / "max_energy_range_uj"
    energy.write_text("1000")
    span.write_text("2000000")
    monkeypatch.setattr(sensors, "_ENERGY", energy)
    monkeypatch.setattr(sensors, "_ENERGY_RANGE", span)
    monkeypatch.setattr(sensors.time, "sleep", lambda _: energy.write_text("500"))  # the counter wrapped around
    monkeypatch.setattr(sensors.time, "perf_counter", iter([10.0, 10.5]).__next__)
    assert torch.npu.power_draw() == round((2_000_000 - 500) / 0.5 / 1000)
