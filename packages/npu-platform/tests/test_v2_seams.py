"""What the V2 runner reads under CUDA's names is read on npu, and nothing else of vLLM's runner is replaced."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from npu_platform import compat

# vLLM's functions that name torch.cuda and are not copied -> why
NOT_COPIED = {
    "model_runner.GPUModelRunner.main_stream": "NPUModelRunnerV2 has its own",
    "async_utils._timing_event": "times steps for adaptive verification, which is refused",
    "spec_decode.adaptive_verification.AdaptiveVerificationManager.__init__": "is refused",
    "spec_decode.adaptive_verification.AdaptiveVerificationManager.record_confidences": "is refused",
    "ubatch_utils.UBatchRunner.__init__": "dual-batch overlap is refused",
    "ubatch_utils.UBatchRunner.begin_capturable_run": "dual-batch overlap is refused",
}
# The same of vLLM 0.33
NOT_COPIED_0_33 = {"spec_decode.adaptive_verification.AdaptiveVerificationManager.reallocate_drafts": "is refused"}


def functions_of_v2() -> Iterator[tuple[str, Any]]:
    """Yield vLLM's functions and methods of the V2 runner, by module and name."""
    package = importlib.import_module("vllm.v1.worker.gpu")
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = importlib.import_module(found.name)
        short = found.name.removeprefix(package.__name__ + ".")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != found.name:
                continue
            if inspect.isclass(value):
                for member, function in vars(value).items():
                    yield f"{short}.{name}.{member}", getattr(function, "func", getattr(function, "fget", function))
            else:
                yield f"{short}.{name}", value


def reads_cuda(function: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    codes = [code] if code is not None else []
    for one in codes:
        codes += [constant for constant in one.co_consts if inspect.iscode(constant)]
    return any("cuda" in one.co_names for one in codes)


def copies() -> set[str]:
    """Return the code of every function of vLLM that our classes run with npu's names."""
    found = set()
    for name in ("drafts", "graphs", "model_runner", "outputs"):
        module = importlib.import_module(f"npu_platform.v2.{name}")
        for value in [*vars(module).values()]:
            for member in [value, *vars(value).values()] if inspect.isclass(value) else [value]:
                function = inspect.unwrap(member) if callable(member) else None
                if getattr(function, "__globals__", {}).get("torch") is compat._TORCH:
                    found.add(function.__code__)
    return found


def test_every_function_that_names_cuda_is_copied_or_known() -> None:
    copied = copies()
    left = {
        name for name, value in functions_of_v2() if reads_cuda(value) and inspect.unwrap(value).__code__ not in copied
    }
    assert left - NOT_COPIED_0_33.keys() == NOT_COPIED.keys()


def test_the_copies_have_the_decorators_of_vllm() -> None:
    """They are repeated by hand, so that a new one would be lost."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner)
    for name in ("sample_tokens", "pool"):
        assert f"    @torch.inference_mode()\n    @step_eplb_after()\n    def {name}(" in source
    assert "    @torch.inference_mode()\n    def capture_model(" in source
    for name in ("__init__", "load_model", "initialize_kv_cache"):
        assert not hasattr(getattr(GPUModelRunner, name), "__wrapped__")
    assert "    @torch.inference_mode()\n    def capture(" in inspect.getsource(CudaGraphManager)


def test_a_manager_of_graphs_captures_on_npu() -> None:
    """vLLM's own managers call ``super().capture``, which must be ours."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from npu_platform.v2.graphs import NPUDraftGraphManager, NPUModelGraphManager

    for manager in (NPUDraftGraphManager, NPUModelGraphManager):
        order = manager.__mro__
        ours = order.index(CudaGraphManager) - 1
        assert "capture" in vars(order[1])
        assert "self._capture(" in inspect.getsource(vars(order[ours])["capture"])
        assert inspect.unwrap(vars(order[ours])["_capture"]).__globals__["torch"] is compat._TORCH


def test_a_drafter_makes_managers_of_npu() -> None:
    from npu_platform.v2 import drafts
    from npu_platform.v2.graphs import NPUDraftGraphManager

    for drafter in (drafts._NPUEagle, drafts._NPUMTP):
        assert drafter.init_cudagraph_manager.__globals__["SpeculatorCudaGraphManager"] is NPUDraftGraphManager


def test_vllm_still_has_no_view_of_host_memory_for_npu() -> None:
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
    from vllm.v1.worker.gpu import buffer_utils

    from npu_platform.v2.buffers import SharedBuffer

    with pytest.raises(ValueError, match="not supported in"):
        get_accelerator_view_from_cpu_tensor(torch.zeros(1))
    before = buffer_utils.UvaBuffer
    with compat.buffers_of_npu():
        pool = buffer_utils.UvaBufferPool(4, torch.int32, max_concurrency=2)
    assert buffer_utils.UvaBuffer is before
    assert all(isinstance(buffer, SharedBuffer) for buffer in pool._uva_bufs)
    grown = pool.copy_to_uva(list(range(9)))
    assert isinstance(pool._uva_bufs[pool._curr], SharedBuffer)
    assert (grown.device.type, grown.tolist()) == ("npu", list(range(9)))
