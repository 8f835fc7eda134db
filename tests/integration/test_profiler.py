"""vLLM's profiler writes a trace that holds the kernels of the npu, those of replayed graphs among them."""

from __future__ import annotations

import collections
import gzip
import json
from typing import TYPE_CHECKING

from tests.support import models
from tests.support.engine_run import run_engine

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, PROMPT, NEW = 4, 20, 5


def test_trace_of_a_run(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    model = models.tiny_qwen3(tmp_path / "model", num_hidden_layers=LAYERS)
    rounds = [{"prompts": models.prompt_token_ids([PROMPT]), "sampling": {"temperature": 0.0, "max_tokens": NEW}}]
    settings = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
    profiler = {"profiler": "torch", "torch_profiler_dir": str(traces)}
    # Unmeasured: on some processors torch's linear is the faster one for layers as small as these.
    run = run_engine(tmp_path / "run", model, rounds, {"NPU_TUNE": "0"}, **settings, profiler_config=profiler)
    assert run.graphs_captured > 0
    (trace,) = traces.glob("*.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = collections.Counter(event["name"] for event in events if event.get("cat") == "kernel")
    # One prefill, then a decode step, which is the replay of a graph, for each token but the first.
    assert kernels["npu_ops::paged_attention"] == LAYERS * NEW
    assert kernels["npu_ops::reshape_and_cache"] == LAYERS * NEW
    assert kernels["npu_ops::linear"] > 0
