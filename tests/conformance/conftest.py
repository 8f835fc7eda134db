"""Which cases run, which are known not to pass (skips.toml), and the share of the CPU's cases that pass on npu.

With `--part` it is a sample: all cases of the operators that the device has kernels of its own for, in the dtypes of
models, and of the others a part that the seed chooses.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch._C import _dispatch_dump

HERE = Path(__file__).parent
LISTED = tomllib.loads((HERE / "skips.toml").read_text())
PARTS = 1000
DTYPES_OF_MODELS = ("float32", "bfloat16", "int64")
CONVOLUTIONS = ("nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d")
OWN_KERNELS = {
    "_copy_from": ("clone", "contiguous", "to", "bfloat16", "half"),
    "_copy_from_and_resize": ("resize_as_",),
    "_fused_sdp_choice": ("nn.functional.scaled_dot_product_attention",),
    "_has_compatible_shallow_copy_type": (),  # packages/npu-platform/tests/device has these: the databases do not
    "_local_scalar_dense": ("item",),
    "_nested_tensor_from_mask_left_aligned": (),
    "_reshape_alias": ("reshape",),
    "_thnn_fused_gru_cell": ("nn_GRUCell",),
    "_thnn_fused_gru_cell_backward": ("nn_GRUCell",),
    "_thnn_fused_lstm_cell": ("nn_LSTMCell",),
    "_thnn_fused_lstm_cell_backward_impl": ("nn_LSTMCell",),
    "as_strided": ("as_strided",),
    "batch_norm_backward_elemt": (),  # those of SyncBatchNorm: packages/npu-platform/tests/device has them as well
    "batch_norm_backward_reduce": (),
    "batch_norm_elemt": (),
    "batch_norm_gather_stats_with_counts": (),
    "batch_norm_stats": (),
    "convolution_backward_overrideable": CONVOLUTIONS,
    "convolution_overrideable": CONVOLUTIONS,
    "empty": ("empty", "zeros"),
    "empty_strided": ("empty_strided", "new_empty_strided"),
    "exponential_": ("exponential",),
    "histc": ("histc",),
    "index": ("__getitem__",),
    "is_set_to": (),
    "linear": ("nn.functional.linear",),
    "linear_backward": ("nn.functional.linear",),
    "native_dropout": ("nn.functional.dropout",),
    "record_stream": (),
    "resize_": ("resize_",),
    "set_": (),
    "unfold": ("unfold",),
    "view": ("view",),
    "zero_": ("zero_",),
}
"""What npu registers kernels of its own for, beside the fallback, and the databases' names that reach it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=float, default=1.0, help="run this part of the cases, from 0 to 1")
    parser.addoption("--seed", default="", help="which part that is")


def pytest_report_header(config: pytest.Config) -> str:
    return f"conformance: part {config.getoption('part')} with seed {config.getoption('seed')!r}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, seed = config.getoption("part", 1.0), config.getoption("seed", "")
    if part < 1:
        own = names_of_own_kernels()
        kept = [
            item for item in items if not is_case(item) or in_sample(item.name, part, seed) or is_own(item.name, own)
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    for item in filter(is_case, items):
        if reason := reason_of(item.name, LISTED["fails"]):
            item.add_marker(pytest.mark.xfail(reason=f"skips.toml: {reason}", strict=True))


def is_case(item: pytest.Item) -> bool:
    """Return whether an item is of this folder: pytest shows a conftest the items of the whole run."""
    return item.path.is_relative_to(HERE)


def in_sample(name: str, part: float, seed: str) -> bool:
    """Return whether a case is of the part that the seed chooses."""
    return zlib.crc32(f"{seed} {name}".encode()) % PARTS < part * PARTS


def is_own(name: str, own: set[str]) -> bool:
    """Return whether a case is of an operator with a kernel of the device's own, in a dtype of models."""
    operator, _, variant = name.removeprefix("test_").partition("_npu_")
    wanted = any(operator.endswith(f"_{each}") for each in own)
    return wanted and ("graph" in name or any(dtype in variant for dtype in DTYPES_OF_MODELS))


def names_of_own_kernels() -> set[str]:
    """Return the names, as tests bear them, through which PyTorch's databases reach the kernels that npu registers.

    Raises:
        pytest.UsageError: a kernel is registered that `OWN_KERNELS` does not know.
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    own = {
        name.removeprefix("aten::").split(".")[0]
        for name in registered
        if name.startswith("aten::")
        and not re.search(r"^PrivateUse1: .*fallback\.cpp", _dispatch_dump(name), re.MULTILINE)
    }
    if unknown := own - OWN_KERNELS.keys():
        msg = f"npu registers kernels that tests/conformance/conftest.py does not list: add {unknown} to OWN_KERNELS"
        raise pytest.UsageError(msg)
    return {each.replace(".", "_") for name in own for each in OWN_KERNELS[name]}


def reason_of(name: str, table: dict[str, str]) -> str | None:
    """Return the reason that a table of skips.toml gives for a test."""
    return next((reason for pattern, reason in table.items() if fnmatch.fnmatchcase(name, pattern)), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count a case that must be refused as an expected failure, if it was refused in the words that it must be."""
    report = yield
    if call.when != "call" or report.skipped or not is_case(item):
        return report
    if reason := reason_of(item.name, LISTED["sparse"]):
        judge_refusal(report, reason, "" if call.excinfo is None else str(call.excinfo.value))
    return report


def judge_refusal(report: pytest.TestReport, reason: str, error: str) -> None:
    """Make a report that of an expected failure, or of a failure to fail so."""
    if re.search(r"npu: its tensors are dense.*sparse", error, re.IGNORECASE):
        report.outcome, report.wasxfail = "skipped", f"skips.toml: {reason}"  # type: ignore[attr-defined]
    elif report.passed:
        report.outcome, report.longrepr = "failed", "skips.toml says that it is refused as sparse, but it passes"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = Counter(outcome(report) for reports in terminalreporter.stats.values() for report in reports)
    counted = counts["passed"] + counts["failed"]
    if counted:
        terminalreporter.write_line(
            f"conformance: {counts['passed']} of {counted} cases that pass on the CPU pass on npu "
            f"({100 * counts['passed'] / counted:.2f} %); {counts['cpu']} fail on the CPU too, {counts['empty']} are "
            f"empty, {counts['refused']} operators cannot be captured in a graph"
        )


def outcome(report: object) -> str | None:
    """Return how a case counts: what skips.toml lists is a failure."""
    if not isinstance(report, pytest.TestReport) or "conformance" not in report.nodeid:
        return None
    if report.skipped:
        reason = str(report.longrepr) + str(getattr(report, "wasxfail", ""))
        if "skips.toml" in reason:
            return "failed"
        if "refused in a graph" in reason:
            return "refused"
        return "cpu" if "the CPU fails too" in reason else "empty"
    if report.failed:
        return "failed"
    return "passed" if report.when == "call" else None
