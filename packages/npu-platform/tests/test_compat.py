"""Each substitution is undone on leaving, and each test fails once vLLM no longer needs it."""

from __future__ import annotations

import inspect

import torch

from npu_platform import compat


def test_streams_are_substituted_and_given_back() -> None:
    names = ("Stream", "Event", "current_stream", "default_stream", "stream")
    before = {name: getattr(torch.cuda, name) for name in names}
    with compat.torch_cuda_streams_on_npu():
        assert all(getattr(torch.cuda, name) is getattr(torch.npu, name) for name in names)
    assert before == {name: getattr(torch.cuda, name) for name in names}


def test_streams_are_given_back_after_an_error() -> None:
    before = torch.cuda.Stream
    try:
        with compat.torch_cuda_streams_on_npu():
            raise KeyError
    except KeyError:
        pass
    assert torch.cuda.Stream is before


def test_vllm_still_names_cuda_streams() -> None:
    from vllm.v1.worker import gpu_model_runner

    assert "torch.cuda.Event" in inspect.getsource(gpu_model_runner.AsyncGPUModelRunnerOutput)
    assert "torch.cuda.Stream()" in inspect.getsource(gpu_model_runner.GPUModelRunner.__init__)


def test_vllm_still_captures_through_a_cuda_only_context() -> None:
    from vllm.distributed import parallel_state
    from vllm.v1.worker import gpu_model_runner

    assert "graph_capture(device=self.device)" in inspect.getsource(gpu_model_runner.GPUModelRunner.capture_model)
    assert "CudaCommunicator" in inspect.getsource(parallel_state.GroupCoordinator.graph_capture)
    before = gpu_model_runner.graph_capture
    with compat.graph_capture_on_npu():
        with gpu_model_runner.graph_capture(device=torch.device("npu")):
            pass
        assert gpu_model_runner.graph_capture is not before
    assert gpu_model_runner.graph_capture is before


def test_vllm_still_warms_up_cuda_kernels_everywhere() -> None:
    from vllm.v1.worker import gpu_worker

    assert "kernel_warmup(self)" in inspect.getsource(gpu_worker.Worker.compile_or_warm_up_model)
    before = gpu_worker.kernel_warmup
    with compat.without_kernel_warmup():
        assert gpu_worker.kernel_warmup(None) is None
    assert gpu_worker.kernel_warmup is before


def test_vllm_still_has_no_way_to_add_a_device_to_its_profiler() -> None:
    from vllm.profiler import wrapper

    assert "npu" not in wrapper._SUPPORTED_PROFILER_KINDS
    with compat.profiler_knows_npu():
        assert wrapper._SUPPORTED_PROFILER_KINDS["npu"] == frozenset({"torch"})
    assert "npu" not in wrapper._SUPPORTED_PROFILER_KINDS


def test_vllm_still_makes_batch_invariance_of_triton_kernels() -> None:
    from vllm.model_executor.determinism import batch_invariant
    from vllm.v1.worker import gpu_worker

    assert "init_batch_invariance()" in inspect.getsource(gpu_worker.init_worker_distributed_environment)
    assert "current_platform.dispatch_key" in inspect.getsource(batch_invariant.enable_batch_invariant_mode)
    before = batch_invariant.init_batch_invariance
    with compat.without_triton_batch_invariance():
        assert batch_invariant.init_batch_invariance() is None
    assert batch_invariant.init_batch_invariance is before
