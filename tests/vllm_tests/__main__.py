"""Runs vLLM's own tests with the device npu: ``nox -s vllm_tests``, or with the folder of its sources:

python -m tests.vllm_tests SOURCES --work FOLDER [--table NAME] [--only WORDS] [--limit SECONDS]
python -m tests.vllm_tests --page FILE

A table (``tables/*.toml``) names files and folders of tests, what their processes have in the environment, and why tests
fail or are not run. The tests are copied, and in the copy the name of the device is changed, where a test names one; what
cannot be read on an npu, such as memory by NVML, is left out (:data:`EDITS`). What ran before is kept in the work folder
and not run again; how many passed is kept in ``counts.json``, from which the page is written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from tests.vllm_tests import hub, hub_of_bytes

HERE = Path(__file__).parent
COUNTS = HERE / "counts.json"
NAMES = [
    (r'"cuda"', '"npu"'),
    (r"cuda:\{", "npu:{"),
    (r'"cuda:0"', '"npu:0"'),
    (r"cuda:nccl", "npu:npuccl"),
    (r"\.cuda\(\)", ".npu()"),
    (r"torch\.cuda\.CUDAGraph", "torch.npu.NPUGraph"),
    (r"torch\.cuda\.", "torch.npu."),
    (r"num_gpus=1, max_calls=1", "num_cpus=0, max_calls=1"),
]
"""How a test names a device, and how it does here."""
AS_ON_CUDA = [(r"not current_platform\.is_cuda(_alike)?\(\)", 'current_platform.device_type != "npu"')]
AS_ON_GPUS = [(r"current_platform\.is_cuda_alike\(\)(?=\s+(or|and) )", '(current_platform.device_type == "npu")')]
PAGED = [(r"FLASH_ATTN", "NPU_PAGED")]
SAID = (r'\["the", " the"\]', '["who", "or", "D", "all", "I"]')
ANY_SIZE = (r"@large_gpu_mark\(min_gb=\d+\)\n", "")
OWN_TOKENIZER = [(r"ModelConfig\(tokenizer=TOKENIZER\)", "ModelConfig(model=TOKENIZER)")]
XPU = [
    (r"current_platform\.is_xpu\(\)", 'current_platform.device_type == "npu"'),
    (r"vllm\.lora\.punica_wrapper\.punica_xpu", "npu_platform.lora"),
    (r"PunicaWrapperXPU", "NPUPunicaWrapper"),
]
EDITS = {
    "conftest.py": [(r'else "nccl"', "else current_platform.dist_backend")],
    "utils.py": [
        (r"(?<=\n    assert )threshold_bytes is not None or threshold_ratio is not None\n", "True\n    return\n"),
        (
            r"(?<=\n    if )current_platform.is_cuda\(\):(?=\n        return \[)",
            'current_platform.device_type == "npu":',
        ),
        (r'\["FLASH_ATTN", "TRITON_ATTN"\]', '["NPU_PAGED"]'),
        (r"max_wait_seconds or 480", "max_wait_seconds or 1200"),
    ],
    "entrypoints/rl/weight_transfer/test_offline.py": [(r'backend="nccl"', 'backend="npuccl"')],
    **dict.fromkeys(
        (
            "kernels/attention/test_lightning_attn.py",
            "kernels/fla/test_fused_recurrent_packed_decode.py",
            "kernels/mamba/test_causal_conv1d.py",
            "kernels/mamba/test_mamba_ssm.py",
            "kernels/mamba/test_mamba_ssm_ssd.py",
            "kernels/mamba/test_replayssm_prefill_decode_equivalence_mamba2.py",
            "v1/spec_decode/test_eagle_step_kernel.py",
            "v1/worker/test_prompt_embeds_state.py",
        ),
        AS_ON_GPUS,
    ),
    **dict.fromkeys(
        (
            "kernels/mamba/test_memcpy_u64_tiled.py",
            "kernels/mamba/test_precopy_mamba_align.py",
            "v1/spec_decode/test_dflash2.py",
            "v1/worker/test_gpu_block_table.py",
            "v1/worker/test_gpu_input_batch_v2.py",
            "v1/worker/test_gpu_kpool_tail_slot_mapping.py",
            "v1/worker/test_gpu_rejection_sampler_chunking.py",
            "v1/worker/test_gpu_rejection_sampler_i64.py",
            "v1/worker/test_gpu_row_offsets_i64.py",
            "v1/worker/test_gpu_warmup_blocks.py",
            "v1/worker/test_jit_warmup_migration.py",
            "v1/worker/test_mamba_hybrid_model_state.py",
        ),
        AS_ON_CUDA,
    ),
    "kernels/fla/test_fla_layernorm_guard.py": [
        (r"(?<=\n)(?=def layer_norm_ref\()", "pytestmark = pytest.mark.skip_global_cleanup\n\n\n"),
    ],
    "lora/test_layers.py": XPU,
    "lora/test_lora_manager.py": XPU,
    "v1/e2e/general/test_async_scheduling.py": [(r"FLEX_ATTENTION", "NPU_PAGED"), ANY_SIZE, SAID],
    "v1/e2e/general/test_async_scheduling_accuracy.py": [ANY_SIZE, SAID],
    "v1/e2e/general/test_streaming_input.py": AS_ON_CUDA,
    "v1/engine/test_abort_final_step.py": AS_ON_CUDA,
    "v1/engine/test_async_llm.py": AS_ON_CUDA,
    "v1/engine/test_engine_core.py": AS_ON_CUDA,
    "v1/engine/test_engine_core_client.py": AS_ON_CUDA,
    "v1/metrics/test_ray_metrics.py": [(r"num_gpus=1", "num_cpus=0")],
    "v1/spec_decode/test_eagle.py": PAGED,
    "v1/spec_decode/test_mtp.py": PAGED,
    "v1/spec_decode/test_mtp_structured_output.py": OWN_TOKENIZER,
    "v1/spec_decode/test_vocab_mapping.py": [(r'"error" if device == "cuda" else None', "None")],
    "v1/kv_connector/unit/test_nixl_connector.py": [
        (r"attention_backend=attn_backend, ", ""),
        (r'attention_backend="TRITON_ATTN"', ""),
    ],
    "v1/kv_offload/cpu/test_gpu_worker.py": [
        (
            r"(?=from vllm.v1.kv_offload.cpu.shared_offload_region import)",
            "from our_host_worker import OurHostWorker\n",
        ),
        (r"\bCPUOffloadingWorker\(\n", "OurHostWorker(\n"),
        (r"\.view\(-1, gpu_page_size_bytes\)", ".reshape(-1, gpu_page_size_bytes)"),
    ],
    "v1/structured_output/test_structured_output_manager.py": OWN_TOKENIZER,
    "v1/worker/test_gpu_model_runner.py": [
        (r"(?=from vllm.v1.worker.gpu_worker import)", "from npu_platform.model_runner import NPUModelRunner\n"),
        (r"\bGPUModelRunner\(vllm_config", "NPUModelRunner(vllm_config"),
    ],
}
"""vLLM's helpers: what memory a device has left is asked of NVML. Where a test makes a runner, it is npu's, and where it
makes a worker of offloading npu-kvconnector's, whose places in a chunk are no whole tensors; where it skips itself on
other devices than CUDA's, or takes their attention, it takes npu's; where it knows accelerators that are not like CUDA,
it knows npu; where it wants a large device for a model that is small here, any will do; where an engine's configuration
names a backend of attention that npu refuses, and only NIXL is tried, it names none; where it takes another model's
tokenizer, it takes that model, which has as many tokens; where it forbids a word that the small models never say, it
forbids some that they do; a server has twenty minutes to start, since several share two cores; where it asks Ray for a GPU, it
asks for nothing; where 1,550 tests of one kernel make no engine, none cleans up after one, which takes 0.3 s, by vLLM's
own mark for that; and where it arms CUDA's report of waits, which vLLM leaves off on other devices, it does not."""
AS_THEY_ARE = (
    "v1/worker/test_gpu_profiler.py",
    "v1/worker/test_gpu_worker.py",
    "entrypoints/unit_tests/test_download_kernels_cli.py",
)
"""Tests in which CUDA is the name of a profiler, of an allocator or of a version, and of no device that they run on."""
LIMIT, LIMIT_TOGETHER = 900, 2700  # seconds of a file for which the table says none, and of those that share processes


def main() -> None:
    """Run what has not run yet, or write the page."""
    parser = argparse.ArgumentParser(prog="tests.vllm_tests", description=__doc__)
    parser.add_argument("sources", type=Path, nargs="?", help="vLLM's source distribution, unpacked")
    parser.add_argument("--work", type=Path, help="folder for the copy, the models and the results")
    parser.add_argument("--table", choices=sorted(tables()), help="this table alone")
    parser.add_argument("--only", default="", help="files of which the path has this")
    parser.add_argument(
        "--limit", type=int, default=LIMIT_TOGETHER, help="seconds after which a run of pytest is cut off"
    )
    parser.add_argument("--page", type=Path, help="file for the tables")
    options = parser.parse_args()
    if options.sources:
        sources, work = options.sources.resolve(), options.work.resolve()
        prepare(sources, work)
        for table in [options.table] if options.table else sorted(tables()):
            run_table(table, sources, work, options.only, options.limit)
    if options.page:
        options.page.write_text(page())


def tables() -> dict[str, dict[str, Any]]:
    """Return the tables by name."""
    return {path.stem: tomllib.loads(path.read_text()) for path in (HERE / "tables").glob("*.toml")}


def files(table: dict[str, Any], sources: Path) -> dict[str, dict[str, Any]]:
    """Return what a table says of each file of tests that it runs."""
    left_out = {name for one in table.get("left_out", []) for name in one["files"]}
    found = [
        str(path.relative_to(sources / "tests"))
        for folder in table.get("folders", [])
        for path in sorted((sources / "tests" / folder).glob("test_*.py"))
        if re.match(table.get("pattern", ""), path.name)
    ]
    return table["run"] | {name: table["run"].get(name, {}) for name in found if name not in left_out}


def run_table(name: str, sources: Path, work: Path, only: str, limit: int) -> None:
    """Run the files of a table that have not run yet, and keep how many tests passed."""
    table = tables()[name]
    kept = json.loads(COUNTS.read_text()).get(name, {})
    for listed in groups({file: said for file, said in files(table, sources).items() if only in file}):
        group = [file for file in listed if only or "passed" not in kept.get(file, {})]
        if group:
            print(time.strftime("%H:%M:%S"), group[0], f"and {len(group) - 1} more" if group[1:] else "", flush=True)
            own = table["run"].get(group[0], {}).get("limit", LIMIT)
            run(work, name, group, min(limit, own if len(group) == 1 else LIMIT_TOGETHER))
            keep(name, work, group)


def groups(wanted: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return which files share processes: those of a folder, but for those that want something of their own."""
    alone = [[file] for file, said in wanted.items() if said.keys() - {"why"}]
    folders: dict[str, list[str]] = {}
    for file, said in wanted.items():
        if not said.keys() - {"why"}:
            folders.setdefault(file.rpartition("/")[0], []).append(file)
    return [*folders.values(), *alone]


def keep(name: str, work: Path, group: list[str]) -> None:
    """Write how many tests of each file had each outcome."""
    found = outcomes(work / "junit.xml", group)
    kept = json.loads(COUNTS.read_text())
    for file in group:
        words = Counter(word.partition(":")[0] for word in found[file].values())
        result = work / "results" / name / f"{file.removesuffix('.py').replace('/', '.')}.json"
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(found[file], indent=1))
        kept.setdefault(name, {})[file] = dict(words)
        print("  ", file, dict(words), flush=True)
    COUNTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def prepare(sources: Path, work: Path) -> None:
    """Copy and edit the tests, and write the models."""
    hub.fill(work / "hub" / "hub")
    hub_of_bytes.fill(work / "hub-of-bytes", work / "assets")
    copy = work / "vllm"
    if copy.exists():
        return
    for folder in ("tests", "examples"):
        shutil.copytree(sources / folder, copy / folder)
    shutil.copy(sources / "pyproject.toml", copy)
    (work / "plugins").mkdir()
    for name in ("as_in_a_worker.py", "our_host_worker.py"):
        shutil.copy(HERE / name, work / "plugins")
    for name, edits in EDITS.items():
        edit(copy / "tests" / name, edits)
    for path in copy.glob("tests/**/test_*.py"):
        if not path.as_posix().endswith(AS_THEY_ARE):
            edit(path, NAMES)


def edit(path: Path, edits: list[tuple[str, str]]) -> None:
    """Replace what a file of tests says."""
    text = path.read_text()
    for old, new in edits:
        text = re.sub(old, new, text)
    path.write_text(text)


def run(work: Path, name: str, group: list[str], limit: int) -> None:
    """Run files of tests in a session of its own; what is left of it after `limit` seconds is killed."""
    table = tables()[name]
    said = table["run"].get(group[0], {}) if len(group) == 1 else {}
    log = work / "logs" / f"{name}.{group[0].removesuffix('.py').replace('/', '.')}.log"
    log.parent.mkdir(exist_ok=True)
    report = work / "junit.xml"
    report.unlink(missing_ok=True)
    paths = [f"tests/{file}" for file in group]
    command = [sys.executable, "-m", "pytest", *paths, "-q", "-p", "no:cacheprovider", "--asyncio-mode=auto"]
    # a worker that ends is replaced
    command += ["-n", "2", "--dist", "loadfile"] if len(group) > 1 else []
    command += ["-p", "as_in_a_worker"] if table.get("as_in_a_worker") else []
    command += [f"--timeout={said.get('timeout', 240)}", f"--junitxml={report}", *said.get("options", [])]
    environ = os.environ | {
        "HF_HOME": str(work / table.get("hub", "hub")),
        "VLLM_ASSETS_CACHE": str(work / "assets"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` Ray would make an environment of its own for its workers
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # what is counted was counted on V1; tables of V2's tests say so
        "NPU_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join((str(work / "plugins"), str(work / "vllm"))),  # servers import parts of tests
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environ |= table.get("environ", {}) | said.get("environ", {})
    plugins = [str(install(work, plugin)) for plugin in said.get("plugins", [])]
    environ["PYTHONPATH"] = os.pathsep.join([*plugins, environ["PYTHONPATH"]])
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=work / "vllm", env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # which still writes the report
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def install(work: Path, plugin: str) -> Path:
    """Install a plugin that vLLM has for its tests into a folder of its own, which is returned."""
    place = work / "plugins" / plugin
    if not place.exists():
        options = ("--quiet", "--no-deps", "--python", sys.executable, "--target", str(place))
        subprocess.run(["uv", "pip", "install", *options, str(work / "vllm/tests/plugins" / plugin)], check=True)
    return place


def outcomes(report: Path, group: list[str]) -> dict[str, dict[str, str]]:
    """Return for each file the outcome of each test, with the first line of why."""
    found: dict[str, dict[str, str]] = {file: {} for file in group}
    modules = {f"tests.{file.removesuffix('.py').replace('/', '.')}": file for file in group}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        place = case.get("classname") or case.get("name", "")  # a file that cannot be imported has a name alone
        file = next((file for module, file in modules.items() if f"{place}.".startswith(f"{module}.")), None)
        if file is None:
            continue
        failed = [part for part in case if part.tag in ("failure", "error", "skipped")]
        why = failed[0].get("message") or "" if failed else ""
        word = "passed" if not failed else "skipped" if failed[0].tag == "skipped" else "failed"
        found[file][case.get("name", "")] = f"{word}: {why.splitlines()[0][:200]}" if why else word
    return found


def page() -> str:
    """Return the page."""
    kept = json.loads(COUNTS.read_text())
    return "\n".join(
        [*HEAD, *(line for name, table in sorted(tables().items()) for line in section(name, table, kept))]
    )


def section(name: str, table: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Return the lines of a table."""
    lines = [f"## {table['title']}", "", table["text"], ""]
    if not table["run"] and name not in kept:
        return [*lines, "Not run yet.", ""]
    lines += ["| tests | passed | failed | skipped | why |", "|---|---|---|---|---|"]
    counted = kept.get(name, {})
    for file in sorted(table["run"].keys() | counted.keys()):
        why, found = table["run"].get(file, {}).get("why", ""), counted.get(file)
        if found is None:
            numbers = "- | - | -"
        else:
            numbers = " | ".join(str(found.get(word, 0)) for word in ("passed", "failed", "skipped"))
        lines.append(f"| `{file}` | {numbers} | {why} |")
    if table.get("left_out"):
        lines += ["", "Not run:", "", "| tests | why |", "|---|---|"]
        lines += [f"| {' '.join(f'`{file}`' for file in one['files'])} | {one['why']} |" for one in table["left_out"]]
    return [*lines, ""]


HEAD = [
    "# vLLM's own tests",
    "",
    "vLLM 0.32.0's own tests, from its source distribution, on npu: `nox -s vllm_tests` runs them and writes this page. Models are",
    "small and random under the names that the tests ask for; where a test names a device, it is npu; the model runner is V1 where nothing else is said. `-`: not run yet.",
    "",
]

if __name__ == "__main__":
    main()
