"""Sizes of a step that nobody gave are those of the host's cores, and steps that one thread does are not scheduled ahead.

What the user gave is never changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.vllm_process import run_program

GIVEN = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}  # what vLLM chooses for LLM(), too
CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
cases = json.loads(sys.argv[1])
for arguments in cases:
    config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    scheduler = config.scheduler_config
    sizes = [scheduler.max_num_batched_tokens, scheduler.max_num_seqs, max(config.compilation_config.cudagraph_capture_sizes)]
    sizes.append(scheduler.async_scheduling)
    print("SIZES", json.dumps(sizes))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(num_hidden_layers=1, max_position_embeddings=65536)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def sizes(model: Path, *cases: dict[str, Any], **environ: str) -> tuple[list[list[int]], str]:
    """Return tokens, requests, the largest graph and whether steps are scheduled ahead, of each case, and the log.

    On four cores of a GPU-sized host.
    """
    arguments = [{"model": str(model), "skip_tokenizer_init": True} | case for case in cases]
    environ = {"NPU_NUM_THREADS": "4", "NPU_SIMULATOR_MEMORY": "200GiB"} | environ
    if "NPU_DEVICE" in environ:  # which `import torch` reads
        command = [sys.executable, "-c", CONFIGURE, json.dumps(arguments)]
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
    else:
        done = run_program(CONFIGURE, json.dumps(arguments), **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("SIZES ")]
    return found, done.stdout + done.stderr


def test_sizes_are_those_of_the_cores_unless_they_were_given(model: Path) -> None:
    # vLLM's own choice here is 16384 and 1024, an H200's.
    cases = [{}, GIVEN, {"max_num_seqs": 900}, {"max_num_batched_tokens": 16384}, {"max_num_active_seqs": 300}]
    cases += [{"max_num_scheduled_tokens": 3000}, {"additional_config": {"npu": {"num_threads": 1}}}]
    cases += [{"enable_chunked_prefill": False}, {}]
    found, log = sizes(model, *cases)
    assert [case[:2] for case in found] == [
        [2048, 256],
        [8192, 256],
        [2048, 900],
        [16384, 256],
        [2048, 300],
        [3000, 256],
        [1024, 128],
        [65536, 256],  # a step must hold the longest prompt
        [2048, 256],
    ]
    assert found[0][2] == 128
    line = "A step takes 2048 tokens and 256 requests at most, for 4 cores (vLLM's choice for a GPU with this memory: 16384 and 1024)"
    assert line in log
    assert "--max-num-batched-tokens and --max-num-seqs" in log


def test_throughput_keeps_vllms_sizes(model: Path) -> None:
    (found,), log = sizes(model, {"performance_mode": "throughput"})
    assert found[:2] == [32768, 2048]
    assert "A step takes" not in log


@pytest.mark.nightly  # a fresh import of vLLM
def test_a_device_that_is_not_the_host_keeps_vllms_sizes(model: Path) -> None:
    (found,), log = sizes(model, {}, NPU_DEVICE="null")
    assert found[:2] == [16384, 1024]
    assert found[3] is True
    assert "A step takes" not in log


def test_steps_are_scheduled_ahead_where_that_hides_something_or_was_asked_for(model: Path) -> None:
    cases: list[dict[str, Any]] = [{}, {"async_scheduling": True}, {"async_scheduling": False}]
    cases += [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "async_scheduling": False}]
    cases += [{"performance_mode": "throughput"}]
    found, log = sizes(model, *cases, NPU_SIMULATOR_DEVICES="2", NPU_SIMULATOR_MEMORY="100GiB")
    assert [case[3] for case in found] == [False, True, False, True, False, False]
    assert log.count("--async-scheduling does it all the same") == 1


def test_a_configuration_built_by_hand_is_all_given() -> None:
    from vllm.config import DeviceConfig, SchedulerConfig, VllmConfig

    scheduler = SchedulerConfig.default_factory(max_num_batched_tokens=16384, max_num_seqs=1024)
    config = VllmConfig(scheduler_config=scheduler, device_config=DeviceConfig("npu"))
    assert (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs) == (16384, 1024)
