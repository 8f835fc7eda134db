"""An engine that waits for devices of Ray's nodes says which it lacks, and what to do; tests/e2e/test_ray.py has nodes."""

from __future__ import annotations

import itertools
import logging.handlers
import threading
from typing import Any

from npu_platform.distributed.ray_devices import logger, missing_devices, saying_what_is_missing


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "NodeManagerAddress": f"10.0.0.{name}", "Resources": resources}


def test_a_ray_that_was_started_without_devices_is_said_to_be_so() -> None:
    said = missing_devices([node("1", CPU=2.0), node("2", CPU=2.0)], {"1": {"CPU": 2.0}}, 2)
    assert said is not None
    assert "has 0 free of the resource NPU and this engine needs 2 (10.0.0.1 has 0, 0 free, 10.0.0.2 has 0, 0" in said
    assert "`ray start --resources='{\"NPU\": 2}'`" in said


def test_devices_that_others_use_are_missing_and_so_are_those_of_nodes_that_died() -> None:
    nodes = [node("1", NPU=2.0), node("2", NPU=2.0), node("3", alive=False, NPU=8.0)]
    said = missing_devices(nodes, {"1": {"NPU": 1.0}, "3": {"NPU": 8.0}}, 2)
    assert said is not None
    assert "has 1 free of the resource NPU and this engine needs 2 (10.0.0.1 has 2, 1 free, 10.0.0.2 has 2, 0" in said
    assert missing_devices(nodes, {"1": {"NPU": 1.0}, "2": {"NPU": 1.0}}, 2) is None


def test_it_is_said_once_when_it_is_so() -> None:
    told = logging.handlers.BufferingHandler(10)
    answers = itertools.chain([None, None], itertools.repeat("two are missing"))
    asked = threading.Semaphore(0)

    def ask() -> str | None:
        asked.release()
        return next(answers)

    logger.addHandler(told)
    try:
        with saying_what_is_missing(ask, patience=0.01):
            for _ in range(3):
                assert asked.acquire(timeout=10)
            assert not asked.acquire(timeout=0.2)
        with saying_what_is_missing(lambda: "too early", patience=60):
            pass
    finally:
        logger.removeHandler(told)
    (record,) = told.buffer
    assert (record.levelname, record.getMessage()) == ("WARNING", "two are missing")
