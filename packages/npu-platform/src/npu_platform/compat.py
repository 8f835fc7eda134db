"""The places where vLLM 0.32 has no seam for another device: one scoped substitution each, undone on leaving.

Each function says why it is needed and which versions need it; ``tests/test_compat.py`` fails when vLLM no longer
has the name, so that the function can go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_STREAM_NAMES = ("Stream", "Event", "current_stream", "default_stream", "stream")


@contextlib.contextmanager
def torch_cuda_streams_on_npu() -> Iterator[None]:
    """Let code that names ``torch.cuda.Stream`` and the like get the npu's.

    Why: ``GPUModelRunner`` and its asynchronous outputs construct ``torch.cuda.Stream``, ``Event`` and ``stream``
    by name (gpu_model_runner.py: AsyncGPUModelRunnerOutput, __init__, sample_tokens, _copy_draft_token_ids_to_cpu).
    Versions: vLLM 0.32. Scope: the construction of the runner and the methods that copy results to the host.
    """
    # Not mock.patch: this runs every step with asynchronous scheduling, and mock takes ten times as long.
    saved = [(name, getattr(torch.cuda, name)) for name in _STREAM_NAMES]
    try:
        for name in _STREAM_NAMES:
            setattr(torch.cuda, name, getattr(torch.npu, name))
        yield
    finally:
        for name, value in saved:
            setattr(torch.cuda, name, value)


@contextlib.contextmanager
def graph_capture_on_npu() -> Iterator[None]:
    """Let ``GPUModelRunner.capture_model`` run without ``parallel_state.graph_capture``.

    Why: that context manager asserts a CUDA or XPU communicator and makes a ``torch.cuda.Stream``; npu streams are
    synchronous, so a capture needs no stream of its own. Versions: vLLM 0.32. Scope: the capture at start.
    """
    from vllm.v1.worker import gpu_model_runner

    with mock.patch.object(gpu_model_runner, "graph_capture", return_value=contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def without_kernel_warmup() -> Iterator[None]:
    """Keep ``Worker.compile_or_warm_up_model`` from warming up CUDA kernels.

    Why: ``kernel_warmup`` imports CUDA-only model modules, and torchvision, whatever the platform. Versions: vLLM
    0.32. Scope: the warm-up at start.
    """
    from vllm.v1.worker import gpu_worker

    with mock.patch.object(gpu_worker, "kernel_warmup", return_value=None):
        yield


@contextlib.contextmanager
def profiler_knows_npu() -> Iterator[None]:
    """Let vLLM's profiler accept the device type ``npu``, with the activities of the host and of the device.

    Why: three tables in ``vllm.profiler.wrapper`` list the device types, without a way to add one. Versions: vLLM
    0.32. Scope: the worker's construction and its ``profile`` call.
    """
    from vllm.profiler import wrapper

    additions: dict[str, Any] = {
        "_DEFAULT_TORCH_PROFILER_ACTIVITIES": ("CPU", "PrivateUse1"),
        "_SUPPORTED_TORCH_PROFILER_ACTIVITIES": frozenset({"CPU", "PrivateUse1"}),
        "_SUPPORTED_PROFILER_KINDS": frozenset({"torch"}),
    }
    with contextlib.ExitStack() as stack:
        for table, entry in additions.items():
            stack.enter_context(mock.patch.dict(getattr(wrapper, table), {"npu": entry}))
        yield


@contextlib.contextmanager
def without_triton_batch_invariance() -> Iterator[None]:
    """Keep ``init_worker_distributed_environment`` from replacing torch's operators by Triton kernels.

    Why: with VLLM_BATCH_INVARIANT, ``enable_batch_invariant_mode`` registers its Triton softmax, mean and bmm for any
    platform's dispatch key; npu-ops reads the variable itself. Versions: vLLM 0.32. Scope: the worker's start.
    """
    from vllm.model_executor.determinism import batch_invariant

    with mock.patch.object(batch_invariant, "init_batch_invariance", return_value=None):
        yield
