"""Each substitution is undone when the last has left, and a test of each fails once vLLM no longer needs it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from npu_platform import compat
from npu_platform.sampling.triton_bodies import TRITON_BODIES
from npu_platform.state_copies import bodies_of_copies, copy_pieces

STREAMS = ("Stream", "Event", "current_stream", "default_stream", "stream")
SUBSTITUTIONS = {
    "sources": (compat.quick_sources, "inspect", "getsourcelines"),
    "graph_capture": (compat.graph_capture_on_npu, "vllm.v1.worker.gpu_model_runner", "graph_capture"),
    "warmup_kernels": (compat.short_warm_up, "vllm.v1.worker.gpu_worker", "warmup_kernels"),
    "kernel_warmup": (compat.without_kernel_warmup, "vllm.v1.worker.gpu_worker", "kernel_warmup"),
    "weights": (
        compat.weights_in_host_memory,
        "vllm.model_executor.offloader.uva",
        "get_accelerator_view_from_cpu_tensor",
    ),
    "buffers": (compat.buffers_of_npu, "vllm.v1.worker.gpu.buffer_utils", "UvaBuffer"),
    "batch_invariance": (
        compat.without_triton_batch_invariance,
        "vllm.model_executor.determinism.batch_invariant",
        "init_batch_invariance",
    ),
}


def names_read() -> list[object]:
    """What a function of vLLM finds under the names of CUDA's streams."""
    return [getattr(torch.cuda, name) for name in STREAMS]


def later(value: int = 1, *, more: int = 2) -> int:
    return value + more + addend


addend = 4


def test_a_copy_finds_npu_streams_and_the_original_does_not() -> None:
    before = [getattr(torch.cuda, name) for name in STREAMS]
    assert compat.with_npu_streams(names_read)() == [getattr(torch.npu, name) for name in STREAMS]
    assert names_read() == before


def test_a_copy_keeps_name_and_defaults() -> None:
    copy = compat.reading(later, addend=0)
    assert (copy(), copy(10, more=20), copy.__module__, copy.__qualname__) == (3, 30, later.__module__, "later")
    assert later() == 7


def test_no_other_thread_sees_what_a_copy_reads() -> None:
    before = names_read()
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(lambda: [compat.with_npu_streams(names_read)() for _ in range(2000)])
        theirs = pool.submit(lambda: [names_read() for _ in range(2000)])
    assert all(names == before for names in theirs.result())
    assert all(names[0] is torch.npu.Stream for names in ours.result())


@pytest.fixture(autouse=True)
def nothing_is_substituted() -> None:
    compat.end_quick_sources()  # which this process has begun with the import of vLLM


@pytest.mark.parametrize("name", SUBSTITUTIONS)
def test_a_substitution_lasts_until_the_last_thread_has_left(name: str) -> None:
    """The second thread enters while the first is inside, and leaves after it."""
    substitution, module, attribute = SUBSTITUTIONS[name]
    names = importlib.import_module(module)
    before = getattr(names, attribute)
    both_inside, first_left = threading.Barrier(2), threading.Event()

    def first() -> None:
        with substitution():
            both_inside.wait(60)
        first_left.set()

    def second() -> object:
        with substitution():
            both_inside.wait(60)
            assert first_left.wait(60)
            return getattr(names, attribute)

    with ThreadPoolExecutor(2) as pool:
        started = pool.submit(first)
        inside = pool.submit(second).result()
        started.result()
    assert inside is not before
    assert getattr(names, attribute) is before


def test_a_substitution_is_undone_after_an_error() -> None:
    from vllm.v1.worker import gpu_worker

    before = gpu_worker.kernel_warmup
    with pytest.raises(KeyError), compat.without_kernel_warmup():
        raise KeyError
    assert gpu_worker.kernel_warmup is before


def test_every_substitution_is_listed() -> None:
    """What the context managers of the module change, all together, is `SUBSTITUTED`."""
    spaces = {module: vars(importlib.import_module(module)) for module in compat.SUBSTITUTED}
    before = {module: dict(space) for module, space in spaces.items()}
    tables = {
        (module, name): dict(table)
        for module, space in spaces.items()
        for name, table in space.items()
        if type(table) is dict and name.isupper()
    }
    managers = (
        compat.graph_capture_on_npu,
        compat.without_kernel_warmup,
        compat.short_warm_up,
        compat.buffers_of_npu,
        compat.profiler_knows_npu,
        compat.weights_in_host_memory,
        compat.quick_sources,
        partial(compat.known_hash, importlib.import_module("triton.runtime.cache"), "digest"),
    )
    with contextlib.ExitStack() as stack:
        for manager in (*managers, compat.without_triton_batch_invariance):
            stack.enter_context(manager())
        changed = {
            module: {name for name in space if space[name] is not before[module].get(name)}
            for module, space in spaces.items()
        }
        for (module, name), table in tables.items():
            changed[module] |= {f"{name}[{key}]" for key in spaces[module][name].keys() - table.keys()}
    assert changed == {module: set(names) for module, names in compat.SUBSTITUTED.items()}
    assert before == {module: dict(space) for module, space in spaces.items()}


def test_vllm_still_names_cuda_streams_where_we_copy_and_nowhere_else() -> None:
    """A method that reads `torch.cuda` and is not copied would meet the real one."""
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

    from npu_platform.model_runner import NPUModelRunner

    copied = {name for name, value in vars(NPUModelRunner).items() if is_copy(value)}
    reading_cuda = {name for name, value in vars(GPUModelRunner).items() if callable(value) and reads_cuda(value)}
    # an error that every build of torch has
    assert reading_cuda - {"load_model"} == copied - {"sample_tokens", "_make"} | {"__init__"}
    assert copied >= {"sample_tokens", "_make"}
    assert reads_cuda(AsyncGPUModelRunnerOutput.__init__)
    assert "AsyncGPUModelRunnerOutput" in inspect.unwrap(GPUModelRunner.sample_tokens).__code__.co_names


def test_the_copies_have_the_decorators_of_vllm() -> None:
    """They are repeated by hand, so that a new one would be lost."""
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

    source = inspect.getsource(GPUModelRunner)
    assert "    @torch.inference_mode\n    def sample_tokens(" in source
    assert "    @JitWarmupRegistry.capture\n    def __init__(" in source
    for name in ("_copy_draft_token_ids_to_cpu", "_copy_valid_sampled_token_count"):
        assert f"\n\n    def {name}(" in source
    for method in (GPUModelRunner.sample_tokens, GPUModelRunner.__init__):
        assert not hasattr(method.__wrapped__, "__wrapped__")
    assert not hasattr(AsyncGPUModelRunnerOutput.__init__, "__wrapped__")


def is_copy(value: object) -> bool:
    names = getattr(inspect.unwrap(value), "__globals__", {}) if callable(value) else {}
    return names.get("torch") is compat._TORCH


def reads_cuda(function: Any) -> bool:
    """Whether `torch.cuda` is read in a function, or in one that it defines."""
    codes = [inspect.unwrap(function).__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return any("cuda" in code.co_names for code in codes)


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


def test_vllm_still_makes_views_of_the_host_for_cuda_and_xpu_alone() -> None:
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.offloader import uva

    name = "get_accelerator_view_from_cpu_tensor"
    assert getattr(uva, name) is getattr(utils, name)
    with pytest.raises(ValueError, match="not supported in"):
        getattr(uva, name)(torch.ones(1))


def test_vllm_still_puts_a_router_with_adapters_where_nothing_reads_it() -> None:
    from vllm.lora.layers import FusedMoEWithLoRA

    assert not hasattr(FusedMoEWithLoRA, "gate")
    assert "return self.base_layer.forward(*args, **kwargs)" in inspect.getsource(FusedMoEWithLoRA.forward)
    model, layer = torch.nn.Module(), FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    model.experts, layer.base_layer, layer.gate = layer, torch.nn.Module(), torch.nn.Identity()
    assert compat.route_by_adapters(model) is model
    assert layer.base_layer.gate is layer.gate


def test_vllm_still_warms_up_cuda_kernels_everywhere() -> None:
    from vllm.v1.worker import gpu_worker

    assert "kernel_warmup(self)" in inspect.getsource(gpu_worker.Worker)
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


def test_vllm_still_tells_no_platform_which_sizes_were_given() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.interface import Platform

    assert "current_platform.pre_register_and_update()" in inspect.getsource(EngineArgs.create_engine_config)
    assert not [name for name in dir(Platform) if "batch" in name]
    assert compat.engine_arguments_in_progress() is None


def test_kernels_are_replaced_beside_modules_with_strange_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own function fails at an object as llvmlite has them."""
    from vllm.triton_utils import dispatcher

    class MakesUpAttributes:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            return []

    module = types.ModuleType("strange")
    vars(module)["strange"] = MakesUpAttributes()
    monkeypatch.setitem(sys.modules, "strange", module)
    with pytest.raises(AttributeError):
        dispatcher._rebind_kernels([])
    compat.register_kernels({})


def test_kernels_of_a_module_that_is_not_imported_yet_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a fresh worker; what launches a kernel holds it, too."""
    import vllm

    (tmp_path / "late_kernels.py").write_text(
        "def kernel(x): ...\nclass Launcher: ...\nlauncher = Launcher()\nlauncher.kernel = kernel\n"
    )
    monkeypatch.setattr(vllm, "__path__", [*vllm.__path__, str(tmp_path)])
    compat.register_kernels({"vllm.late_kernels.kernel": abs})
    module = sys.modules.pop("vllm.late_kernels")
    assert module.kernel(-1) == module.launcher.kernel(-1) == 1


def test_kernels_are_back_for_an_engine_that_has_no_bodies_for_them() -> None:
    """The next engine of a process may be one of the V2 runner, which launches vLLM's own, with other arguments."""
    from vllm.triton_utils import dispatcher
    from vllm.v1.spec_decode import utils
    from vllm.v1.worker import mamba_utils

    draft = utils._eagle_prepare_inputs_padded
    compat.register_kernels({})
    before = (mamba_utils.postprocess_mamba_fused_kernel, utils.eagle_prepare_inputs_padded_kernel, draft.kernel)
    v1 = bodies_of_copies(of_drafts=True) | TRITON_BODIES
    for bodies in (v1, v1, bodies_of_copies(of_drafts=False)):
        compat.register_kernels(bodies)
        now = (mamba_utils.postprocess_mamba_fused_kernel, utils.eagle_prepare_inputs_padded_kernel, draft.kernel)
        replaced = [isinstance(kernel, dispatcher.KernelOverride) for kernel in now]
        assert (replaced == [True] * 3) if bodies is v1 else all(a is b for a, b in zip(now, before, strict=True))
        assert set(bodies) <= set(dispatcher._registry)
    assert isinstance(mamba_utils.batch_memcpy_kernel, dispatcher.KernelOverride)
    assert mamba_utils.batch_memcpy_kernel.func is copy_pieces


def test_top_k_and_top_p_are_asked_for_as_either_version_of_vllm_wants_it() -> None:
    class Of032:
        def get_top_k_top_p(self, rows: object, requests: object) -> tuple[object, ...]:
            return rows, requests

    class Of033:
        def get_top_k_top_p(self, rows: object, requests: object, vocab_size: int) -> tuple[object, ...]:
            return rows, vocab_size, False

    assert compat.top_k_top_p(Of032(), "k", "p", 7) == ("k", "p")
    assert compat.top_k_top_p(Of033(), "k", "p", 7) == ("k", 7)


def test_latent_attention_takes_what_vllm_gives_it() -> None:
    """vLLM 0.33 says besides whether the scale is 1."""
    from vllm.v1.attention.backend import MLAAttentionImpl

    from npu_platform.attention.mla import NPUMLAAttention

    wanted = inspect.signature(MLAAttentionImpl.do_kv_cache_update).parameters
    taken = inspect.signature(NPUMLAAttention.do_kv_cache_update).parameters
    assert "skip_scale" in taken
    assert wanted.keys() <= taken.keys()


def test_the_wait_for_a_message_polls_still_and_nobody_can_say_otherwise() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
    from vllm.v1.executor.multiproc_executor import WorkerProc

    assert inspect.signature(SpinCondition).parameters["busy_loop_s"].default == 1
    for method in (MessageQueue.__init__, MessageQueue.create_from_handle):
        assert "busy_loop_s" not in inspect.getsource(method)
    loop = inspect.getsource(WorkerProc.worker_busy_loop)
    assert "self.rpc_broadcast_mq.dequeue(indefinite=True)" in loop
    assert "self._execute_worker_rpc(" in loop


def test_a_warm_up_of_the_v2_runner_knows_of_two_requests() -> None:
    from vllm.v1.worker import gpu_worker

    assert "warmup_kernels(" in inspect.getsource(gpu_worker.Worker)
    config = types.SimpleNamespace(max_num_seqs=128, max_num_batched_tokens=1024)
    runner = types.SimpleNamespace(scheduler_config=config, adaptive_verification=1)
    short: Any = compat._OfTwoRequests(runner)
    short.adaptive_verification = None
    assert vars(short.scheduler_config) == {"max_num_seqs": 2, "max_num_batched_tokens": 1024}
    assert (config.max_num_seqs, runner.adaptive_verification) == (128, None)
    config.max_num_seqs = 1
    assert short.scheduler_config.max_num_seqs == 1


def test_shared_memory_without_a_name_is_still_shared() -> None:
    writer = MessageQueue(1, 1, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(writer.wait_until_ready)
        reader.wait_until_ready()
        ready.result(10)
    path = Path("/dev/shm", writer.buffer.shared_memory.name)
    assert path.exists()
    compat.remove_name(reader)
    assert not path.exists()
    writer.enqueue("there")
    assert reader.dequeue(timeout=10) == "there"
    path.touch()  # for its maker, who removes it
    compat.remove_name(MessageQueue(1, 0, connect_ip="127.0.0.1"))  # of another host
    compat.remove_name(None)
