"""Runs rounds of prompts through an engine whose ranks somebody else has started, as torchrun does.

``run_launched`` is for tests; the module's main is one rank where torchrun's variables are set, and otherwise starts the
ranks with them: ``python -m tests.support.launched_run scenario.json``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.engine_run import run_scenario
from tests.support.vllm_process import run_module

__all__ = ["run_launched", "said_by", "write_scenario"]


def run_launched(
    folder: Path,
    model: Path,
    rounds: list[dict[str, Any]],
    environ: dict[str, str],
    *,
    ranks: int,
    **engine: Any,
) -> list[list[int]]:
    """Run rounds (see ``tests.support.engine_run``) on `ranks` processes, which share the variables `environ`.

    Return the token ids of the first round, of which the ranks must be of one mind.
    """
    scenario = write_scenario(folder, model, rounds, ranks=ranks, **engine)
    done = run_module("tests.support.launched_run", scenario, **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environ)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return said_by(ranks, scenario)


def write_scenario(folder: Path, model: Path, rounds: list[dict[str, Any]], *, ranks: int, **engine: Any) -> Path:
    """Write what all ranks are to do."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = {"model": str(model), "distributed_executor_backend": "external_launcher", **engine}
    scenario = folder / "scenario.json"
    scenario.write_text(json.dumps({"engine": engine, "rounds": rounds, "ranks": ranks}))
    return scenario


def said_by(ranks: int, scenario: Path) -> list[list[int]]:
    """Return what each rank has said, which must be the same."""
    said = [json.loads(_result(scenario, rank).read_text()) for rank in range(ranks)]
    assert all(one == said[0] for one in said), "the ranks say different things"
    return said[0]


def main(scenario_file: str) -> None:
    """Be a rank, or start all."""
    scenario = Path(scenario_file)
    if "RANK" in os.environ:
        _be_rank(scenario)
    else:
        _start(scenario)


def _start(scenario: Path) -> None:
    from vllm.utils.network_utils import get_open_port

    size = json.loads(scenario.read_text())["ranks"]
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_open_port())}
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_be_rank, args=(scenario, rank)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0] * size


def _be_rank(scenario: Path, number: int | None = None) -> None:
    if number is not None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    asked = json.loads(scenario.read_text())
    run = run_scenario({name: asked[name] for name in ("engine", "rounds")})
    said = [output["tokens"] for output in run["rounds"][0]]
    _result(scenario, int(os.environ["RANK"])).write_text(json.dumps(said))


def _result(scenario: Path, rank: int) -> Path:
    return scenario.with_name(f"said-{rank}.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
