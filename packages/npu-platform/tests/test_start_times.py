from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from npu_platform.start_times import StartTimes, process_age


def test_the_parts_of_a_start_and_the_rest_are_its_time() -> None:
    times = StartTimes()
    for _ in range(2):
        with times.part("model"):
            time.sleep(0.05)
    time.sleep(0.05)
    total, *parts = (float(number) for number in re.findall(r"\d+\.\d+", times.text()))
    assert re.fullmatch(r"\S+ s: imports \S+, model \S+, other \S+", times.text())
    assert abs(total - process_age()) < 0.2
    assert abs(total - sum(parts)) < 0.05
    assert 0.09 < parts[1] < 0.5
    assert parts[2] > 0.04


def test_the_age_is_that_of_the_process() -> None:
    program = "import time; time.sleep(0.3); from npu_platform.start_times import process_age; print(process_age())"
    begin = time.monotonic()
    environ = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert 0.3 <= float(done.stdout) < time.monotonic() - begin + 0.1
    assert float(done.stdout) < process_age()
