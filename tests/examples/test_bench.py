"""Every sub-command of `vllm bench` runs unchanged on npu."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from npu_platform.demo import MODEL
from tests.support.models import tiny_llama
from tests.support.multimodal import tiny_qwen2_5_vl
from tests.support.server import serve_demo

LONGEST = 400
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
TABLES = "vllm[bench] brings it"
SMALL = ("--max-model-len", "256", "--kv-cache-memory-bytes", str(1 << 25), "--max-num-seqs", "4")
SHAPE = ("--input-len", "16", "--output-len", "8")
RANDOM = ("--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "6")
SERVED = ("--served-model-name", "demo", "--tokenizer", str(MODEL), "--dataset-name", "random", *RANDOM)


def test_latency(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    model = tiny_llama(tmp_path / "model", vocab_size=10_000)  # it asks for token ids below that
    rounds = ("--num-iters-warmup", "1", "--num-iters", "2", "--batch-size", "2", "--disable-detokenize")
    options = ("--skip-tokenizer-init", *SMALL, *SHAPE, *rounds)
    bench("latency", "--model", str(model), *options, "--output-json", str(result))
    assert json.loads(result.read_text())["avg_latency"] > 0


def test_throughput(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    asked = ("--dataset-name", "random", *RANDOM)
    bench("throughput", "--model", str(MODEL), *SMALL, *asked, "--output-json", str(result))
    assert json.loads(result.read_text())["tokens_per_second"] > 0


def test_startup(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    rounds = ("--num-iters-cold", "1", "--num-iters-warmup", "1", "--num-iters-warm", "1")
    bench("startup", "--model", str(MODEL), *SMALL, *rounds, "--output-json", str(result))
    assert result.exists()


def test_serve(tmp_path: Path) -> None:
    with serve_demo(tmp_path) as server:
        kept = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json")
        bench("serve", "--base-url", server.url, "--model", "demo", *SERVED, "--ignore-eos", *kept)
    assert json.loads((tmp_path / "result.json").read_text())["completed"] == 6


@pytest.mark.usefixtures("port")
def test_sweep_of_settings(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason=TABLES)
    parameters = tmp_path / "bench.json"
    parameters.write_text(json.dumps([{"max_concurrency": 1}, {"max_concurrency": 2}]))
    sweep(tmp_path, "serve", "--bench-params", str(parameters))
    assert list((tmp_path / "sweep").rglob("*.json"))


@pytest.mark.usefixtures("port")
def test_sweep_of_workloads_and_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason=TABLES)
    pytest.importorskip("seaborn", reason=TABLES)
    sweep(tmp_path, "serve_workload", "--workload-var", "max_concurrency", "--workload-iters", "3")
    [experiment] = (tmp_path / "sweep").iterdir()
    summaries = [json.loads(file.read_text()) for file in experiment.rglob("summary.json")]
    assert {run["max_concurrency"] for summary in summaries for run in summary} > {1}
    bench("sweep", "plot", str(experiment), "--var-x", "max_concurrency")
    bench("sweep", "plot_pareto", str(experiment), "--gpu-count-var", "num_gpus")
    assert {file.name for file in experiment.rglob("*.png")} == {"FIGURE.png", "PARETO.png"}


def test_sweep_of_starts(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason=TABLES)
    rounds = ("--num-iters-cold", "1", "--num-iters-warmup", "1", "--num-iters-warm", "1")
    start = shlex.join([*VLLM, "bench", "startup", "--model", str(MODEL), *SMALL, *rounds])
    parameters = tmp_path / "serve.json"
    parameters.write_text(json.dumps([{"enforce_eager": True}]))
    asked = ("--startup-cmd", start, "--serve-params", str(parameters), "--output-dir", str(tmp_path / "sweep"))
    bench("sweep", "startup", *asked)
    [run] = (tmp_path / "sweep").rglob("run=0.json")
    assert json.loads(run.read_text())["enforce_eager"] is True


def sweep(folder: Path, kind: str, *arguments: str) -> None:
    """Run a sweep of a server that answers few requests."""
    serve = shlex.join([*VLLM, "serve", str(MODEL), "--served-model-name", "demo", *SMALL])
    client = shlex.join([*VLLM, "bench", "serve", "--model", "demo", *SERVED])
    asked = ("--serve-cmd", serve, "--bench-cmd", client, "--num-runs", "1", "--after-bench-cmd", "true")
    bench("sweep", kind, *asked, *arguments, "--output-dir", str(folder / "sweep"))


def test_processors_of_images(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason=TABLES)
    model = tiny_qwen2_5_vl(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    images = (
        "--dataset-name",
        "random-mm",
        "--num-prompts",
        "3",
        "--random-input-len",
        "16",
        "--random-output-len",
        "2",
    )
    sizes = ("--random-mm-bucket-config", "{(56, 56, 1): 1.0}", "--random-mm-base-items-per-request", "1")
    limits = ("--max-model-len", "256", "--kv-cache-memory-bytes", str(1 << 26), "--num-warmups", "1")
    bench("mm-processor", "--model", str(model), *limits, *images, *sizes)


def bench(*arguments: str) -> None:
    """Run `vllm bench`, and see that it says which device it ran on."""
    settings = {"HF_HUB_OFFLINE": "1", "NPU_SIMULATOR_MEMORY": "2GiB"}
    command = [*VLLM, "bench", *arguments]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
