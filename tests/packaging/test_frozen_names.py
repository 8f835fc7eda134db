"""Names that users write: they change on purpose only, together with this list and the documentation."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re

import pytest

from tests.support.environments import PACKAGES, ROOT

STATISTICS = {
    "path", "interval", "requests", "slow_seconds", "request_ids", "steps", "rotate_mib", "rotate_hours", "keep",
    "compress", "csv", "sqlite", "parquet", "prometheus", "push", "otlp", "tensorboard", "wandb", "statsd",
}  # fmt: skip
ENVIRONMENT = {
    "npu-platform": {
        "NPU_DEVICE",
        "NPU_SIMULATOR_DEVICES",
        "NPU_SIMULATOR_MEMORY",
        "NPU_VISIBLE_DEVICES",
        "NPU_NUM_THREADS",
        "NPU_FALLBACK",
        "NPU_DEBUG",
        "NPU_HUGE_PAGES",
    },
    "npu-ops": {"NPU_HEAD_BITS", "NPU_ISA", "NPU_TUNE"},
    "npu-kvconnector": set(),
    "npu-statlogger": {f"NPU_STATLOGGER_{name.upper()}" for name in STATISTICS},
}
OF_VLLM = {"npu-ops": {"VLLM_BATCH_INVARIANT", "VLLM_CACHE_ROOT"}}
"""Variables of vLLM that a package reads for itself."""
NO_VARIABLES = {"NPU_PAGED", "NPU_MLA"}
"""Other names in capitals: an attention backend."""

SETTINGS = {
    "npu_platform.config.NPUConfig": {"num_threads", "sampler", "sleep_folder", "stopped_seconds"},
    "npu_kvconnector.config.OffloadConfig": {
        "cpu_bytes_to_use",
        "blocks_per_chunk",
        "block_size",
        "eviction_policy",
        "cache_policy_module_path",
        "store_threshold",
        "max_tracker_size",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
        "secondary_tiers",
        "backpressure",
        "guard",
    },
    "npu_kvconnector.config.GuardConfig": {
        "load_seconds",
        "lookup_seconds",
        "store_seconds",
        "call_seconds",
        "failures",
        "open_seconds",
        "max_open_seconds",
        "pending_share",
    },
    "npu_kvconnector.tiers.durable.config.DurableConfig": {
        "path",
        "bytes",
        "namespace",
        "secret_file",
        "encrypt",
        "revision",
        "direct",
        "eviction_policy",
        "sync_seconds",
        "threads",
        "enable_kv_events",
        "locality",
    },
    "npu_kvconnector.tiers.remote.config.RemoteConfig": {
        "busy_share",
        "url",
        "namespace",
        "secret_file",
        "revision",
        "codec",
        "deadline",
        "lookup_deadline",
        "hedge",
        "pack_bytes",
        "pending_bytes",
        "index_blocks",
        "refresh",
        "ttl",
        "concurrency",
        "ca_file",
        "insecure",
        "credentials",
        "store_options",
        "enable_kv_events",
        "locality",
    },
    "npu_kvconnector.p2p.config.P2PConfig": {"secret_file", "peers", "deadline"},
    "npu_kvconnector.tiers.tcp.config.TcpConfig": {
        "secret_file",
        "peers",
        "host",
        "port",
        "bytes",
        "unbound_store_timeout_s",
        "deadline",
        "pending_bytes",
        "num_threads",
        "namespace",
        "revision",
    },
    "npu_statlogger.config.StatLoggerConfig": STATISTICS,
}
PUBLIC = {
    "npu_platform": {"register"},
    "npu_ops": {"register"},
    "npu_kvconnector": {"register", "CONNECTOR", "TRANSFER_CONNECTOR"},
    "npu_statlogger": {"NPUStatLogger", "attach"},
}


def source(package: str) -> str:
    """Return all Python and C++ of a package in one text, without comments, includes and macros' definitions."""
    files = [*(ROOT / "packages" / package).glob("src/**/*.py"), *(ROOT / "packages" / package).glob("csrc/**/*.[ch]*")]
    return "\n".join(file.read_text() for file in sorted(files))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_reads_the_documented_variables_and_no_other(package: str) -> None:
    # A variable is read under its name in quotes; the logger's names are a prefix and the names of its settings.
    quoted = set(re.findall(r"""["'](NPU_[A-Z0-9_]*[A-Z0-9])["'\s]""", source(package)))
    expected = ENVIRONMENT[package] - ENVIRONMENT["npu-statlogger"]
    allowed = {name for names in ENVIRONMENT.values() for name in names} | NO_VARIABLES
    assert expected <= quoted
    assert quoted <= allowed


@pytest.mark.parametrize("package", PACKAGES)
def test_the_documentation_has_each_variable(package: str) -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    rows = set(re.findall(rf"^\| `(\w+)` \| {package} \|", page, flags=re.MULTILINE))
    assert rows == ENVIRONMENT[package] | OF_VLLM.get(package, set())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_doctor_knows_each_variable(package: str) -> None:
    if package == "npu-platform":
        known = set(importlib.import_module("npu_platform.config").ENVIRONMENT)
    else:
        group = importlib.import_module("npu_platform.doctor").VARIABLES
        known = set(importlib.metadata.distribution(package).entry_points.select(group=group).names)
    assert known == ENVIRONMENT[package]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_are_these(name: str) -> None:
    module, _, cls = name.rpartition(".")
    settings = getattr(importlib.import_module(module), cls)
    assert {field.name for field in dataclasses.fields(settings)} == SETTINGS[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_names_are_these(name: str) -> None:
    module = importlib.import_module(name)
    defined = {
        public
        for public in getattr(module, "__all__", None) or vars(module)
        if not public.startswith("_") and getattr(vars(module).get(public), "__module__", name) == name
    }
    submodules = {file.stem for file in (ROOT / "packages" / name.replace("_", "-") / "src" / name).iterdir()}
    foreign = {"annotations", "functools", "logging", "importlib", "importlib_metadata"}
    assert defined - submodules - foreign == PUBLIC[name]


def test_the_readme_shows_the_demo_of_today() -> None:
    importlib.import_module("npu_ops")
    native = sum(op.npu == "native kernel" for op in importlib.import_module("npu_platform.info").registered_ops())
    asked = [fact.question for fact in importlib.import_module("npu_platform.demo.command").questions()]
    readme = (ROOT / "README.md").read_text()
    assert f"ops npu-ops, {native} native kernels" in readme
    sample = readme.partition("```text\n")[2].partition("```")[0]
    shown = re.findall(r"^  (\S.*)$", sample, flags=re.MULTILINE)
    assert shown
    assert shown == asked[: len(shown)]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/developer_guide/workflow.md"])
def test_the_pages_count_what_is_substituted(page: str) -> None:
    listed = importlib.import_module("npu_platform.compat").SUBSTITUTED
    number = sum(len(names) for names in listed.values())
    said = re.findall(r"(\d+)\s+(?:names\s+substituted|scoped substitutions)", (ROOT / page).read_text())
    assert said == [str(number)]


def test_the_launch_header_is_the_same_in_both_packages() -> None:
    platform, ops = (
        (ROOT / "packages" / package / "csrc" / "include" / "npu_launch.h").read_bytes()
        for package in ("npu-platform", "npu-ops")
    )
    assert platform == ops
    assert b"NPU_LAUNCH_ABI" in platform
