"""The places where vLLM has no seam for another device, each with its reason, and where 0.32 and 0.33 differ.

Nothing is changed for good. Most of it is about names that vLLM's functions read: either a copy of such a function
reads them differently (:func:`reading`), which nobody else notices, or a name is substituted for everybody while a
worker or its profiler starts (:data:`SUBSTITUTED` lists these names), until the last thread has left.

Each function says why it is needed and which versions need it; ``tests/test_compat.py`` fails when vLLM no longer
has the name, so that the function can go.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from npu_platform import sources
from npu_platform.host_views import device_view

SUBSTITUTED = {
    "inspect": ("getsourcelines",),
    "triton.runtime.cache": ("hashlib",),
    "vllm.v1.worker.gpu_model_runner": ("graph_capture",),
    "vllm.v1.worker.gpu_worker": ("kernel_warmup", "warmup_kernels"),
    "vllm.v1.worker.gpu.buffer_utils": ("UvaBuffer",),
    "vllm.model_executor.determinism.batch_invariant": ("init_batch_invariance",),
    "vllm.model_executor.offloader.uva": ("get_accelerator_view_from_cpu_tensor",),
    "vllm.model_executor.model_loader.utils": ("get_accelerator_view_from_cpu_tensor",),
    "vllm.profiler.wrapper": (
        "_DEFAULT_TORCH_PROFILER_ACTIVITIES[npu]",
        "_SUPPORTED_TORCH_PROFILER_ACTIVITIES[npu]",
        "_SUPPORTED_PROFILER_KINDS[npu]",
    ),
}
"""Module -> its names that the context managers here substitute for a while. None of them does so in a step."""

_lock = threading.Lock()
_inside: dict[tuple[int, str], tuple[int, Any]] = {}  # (namespace's id, name) -> threads inside, what was there
_ABSENT = object()


def with_npu_streams(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of a method of vLLM, without its decorators, that finds ``torch.npu`` under ``torch.cuda``.

    Further `names` are globals that it reads differently, too.

    Why: ``GPUModelRunner`` and its asynchronous outputs construct ``torch.cuda.Stream``, ``Event`` and ``stream``
    by name (gpu_model_runner.py: AsyncGPUModelRunnerOutput, __init__, sample_tokens, _copy_draft_token_ids_to_cpu).
    So do the V2 runner and what it copies and captures (worker/gpu/: model_runner, async_utils, structured_outputs,
    pp_utils, spec_decode/utils, cudagraph_utils). Versions: vLLM 0.32. A substitution in ``torch.cuda`` would be seen
    by all threads of the process, in every step.
    """
    return reading(inspect.unwrap(function), torch=_TORCH, **names)


def reading(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of `function`, the same code, whose globals are those of its module now, except for `names`."""
    namespace = {**function.__globals__, **names}
    copy = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextlib.contextmanager
def graph_capture_on_npu() -> Iterator[None]:
    """Let ``GPUModelRunner.capture_model`` run without ``parallel_state.graph_capture``.

    Why: that context manager asserts a CUDA or XPU communicator and makes a ``torch.cuda.Stream``; npu streams are
    synchronous, so a capture needs no stream of its own. Versions: vLLM 0.32. Scope: the capture at start.
    """
    from vllm.v1.worker import gpu_model_runner

    with _substituted(vars(gpu_model_runner), "graph_capture", no_graph_capture):
        yield


def no_graph_capture(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """Stand in for ``parallel_state.graph_capture``, for the reason that :func:`graph_capture_on_npu` has."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def buffers_of_npu() -> Iterator[None]:
    """Let the V2 runner make buffers of npu in the place of ``UvaBuffer``.

    Why: ``get_accelerator_view_from_cpu_tensor`` knows CUDA and XPU only, and vLLM's own way without unified addressing
    would have no pinned memory anywhere. Buffers are made in the constructors of two dozen states; those that grow
    later keep their class. Versions: vLLM 0.32. Scope: construction of the runner, load of its model and of its caches.
    """
    from vllm.v1.worker.gpu import buffer_utils

    from npu_platform.v2 import buffers  # this module is imported where no device is

    with _substituted(vars(buffer_utils), "UvaBuffer", buffers.of_device()):
        yield


@contextlib.contextmanager
def weights_in_host_memory() -> Iterator[None]:
    """Let ``--cpu-offload-gb`` make tensors of npu of pinned memory while a model is built and loaded.

    Why: ``get_accelerator_view_from_cpu_tensor`` knows CUDA and XPU only; the offloader takes it for each weight, and
    the loader once more for a weight that a layer has replaced. Versions: vLLM 0.32. Scope: the load of the model.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.offloader import uva

    name = "get_accelerator_view_from_cpu_tensor"
    with _substituted(vars(uva), name, device_view), _substituted(vars(utils), name, device_view):
        yield


@contextlib.contextmanager
def without_kernel_warmup() -> Iterator[None]:
    """Keep ``Worker.compile_or_warm_up_model`` from warming up CUDA kernels.

    Why: ``kernel_warmup`` imports CUDA-only model modules, and torchvision, whatever the platform. Versions: vLLM
    0.32. Scope: the warm-up at start.
    """
    from vllm.v1.worker import gpu_worker

    with _substituted(vars(gpu_worker), "kernel_warmup", _nothing):
        yield


@contextlib.contextmanager
def short_warm_up() -> Iterator[None]:
    """Let the V2 runner's warm-up send two requests through the model, not as many as a step takes, and compute little.

    Why: ``warmup_kernels`` computes a prompt and three steps for all of them, which takes a host seconds. Its kernels
    are compiled for one request or for any other number, and whatever the linear layers give. Versions: vLLM 0.32,
    0.33. Scope: the warm-up at start.
    """
    from vllm.v1.worker import gpu_worker

    with _substituted(vars(gpu_worker), "warmup_kernels", _warm_up_with_two_requests):
        yield


def _warm_up_with_two_requests(runner: Any, execute: Callable[..., Any], sample: Callable[..., Any]) -> None:
    from vllm.config import CompilationMode
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    from npu_platform.v2.dry_steps import without_products

    if runner.compilation_config.mode == CompilationMode.NONE:  # what is compiled has its products in it
        execute = without_products(execute)
    warmup_kernels(_OfTwoRequests(runner), execute, sample)


class _OfTwoRequests:
    """A runner of the V2 kind, of whose configuration the most requests of a step are two."""

    def __init__(self, runner: Any) -> None:
        vars(self)["_runner"] = runner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._runner, name)
        if name != "scheduler_config":
            return value
        return types.SimpleNamespace(**vars(value) | {"max_num_seqs": min(2, value.max_num_seqs)})

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._runner, name, value)


@contextlib.contextmanager
def profiler_knows_npu() -> Iterator[None]:
    """Let vLLM's profiler accept the device type ``npu``, with the activities of the host and of the device.

    Why: three tables in ``vllm.profiler.wrapper`` list the device types, without a way to add one. Versions: vLLM
    0.32. Scope: the worker's construction and its ``profile`` call.
    """
    from vllm.profiler import wrapper

    activities = ("CPU", "PrivateUse1")
    with (
        _substituted(wrapper._DEFAULT_TORCH_PROFILER_ACTIVITIES, "npu", activities),
        _substituted(wrapper._SUPPORTED_TORCH_PROFILER_ACTIVITIES, "npu", frozenset(activities)),
        _substituted(wrapper._SUPPORTED_PROFILER_KINDS, "npu", frozenset({"torch"})),
    ):
        yield


@contextlib.contextmanager
def without_triton_batch_invariance() -> Iterator[None]:
    """Keep ``init_worker_distributed_environment`` from replacing torch's operators by Triton kernels.

    Why: with VLLM_BATCH_INVARIANT, ``enable_batch_invariant_mode`` registers its Triton softmax, mean and bmm for any
    platform's dispatch key; npu-ops reads the variable itself. Versions: vLLM 0.32. Scope: the worker's start.
    """
    from vllm.model_executor.determinism import batch_invariant

    with _substituted(vars(batch_invariant), "init_batch_invariance", _nothing):
        yield


@contextlib.contextmanager
def quick_sources() -> Iterator[None]:
    """Let :func:`inspect.getsourcelines` find the end of a function by its indentation, with the same result.

    Why: ``@triton.jit`` asks it for the source of each kernel of each module that is imported, more than three hundred
    for the V2 runner, and Python splits it into tokens for that, most of a second. Versions: vLLM 0.32 and 0.33,
    Triton 3.5 to 3.8. Scope: imports and configuration, and the worker's start, where vLLM takes Triton's kernels.
    """
    with _substituted(vars(inspect), "getsourcelines", sources.getsourcelines):
        yield


_quickly = contextlib.ExitStack()
atexit.register(_quickly.close)  # of a process that never configures an engine


def begin_quick_sources() -> None:
    """Enter :func:`quick_sources`, once, for what imports modules without a call of ours around it."""
    end_quick_sources()
    _quickly.enter_context(quick_sources())


def end_quick_sources() -> None:
    """Leave it, if :func:`begin_quick_sources` entered it."""
    _quickly.close()


@contextlib.contextmanager
def known_hash(module: types.ModuleType, digest: str) -> Iterator[None]:
    """Let Triton's `module` of its cache compute a SHA-256 in pieces as `digest`: that of its library, which is known.

    Why: ``triton_key`` hashes ``libtriton.so``, 460 MB and a second of a processor, in each process that launches a
    kernel. Nothing else in the module hashes in pieces. Versions: Triton 3.5 to 3.8. Scope: one call of ``triton_key``.
    """
    with _substituted(vars(module), "hashlib", _KnownHash(digest)):
        yield


class _KnownHash:
    """``hashlib``, whose SHA-256 of nothing yet ends as `digest`, whatever is added."""

    def __init__(self, digest: str) -> None:
        self._of_pieces = types.SimpleNamespace(update=_nothing, hexdigest=lambda: digest)

    def sha256(self, *content: bytes) -> Any:
        return hashlib.sha256(*content) if content else self._of_pieces

    def __getattr__(self, name: str) -> Any:
        return getattr(hashlib, name)


_replaced: list[tuple[str, Any, str, Any]] = []  # a kernel's name in vLLM, what holds it by which name, and it itself


def register_kernels(bodies: dict[str, Callable[..., Any]]) -> None:
    """Do as ``vllm.triton_utils.dispatcher.register_kernels``, which replaces Triton kernels, in vLLM's modules alone.

    Kernels that an earlier call has replaced are back, unless `bodies` has them: the call was for another engine.

    Why: it looks at every object of every module of the process, which takes 0.3 s, and fails at one that makes up its
    attributes, as those of llvmlite do, which numba brings; and nothing of vLLM's takes a body back. Versions: vLLM
    0.32. Scope: the worker's start.
    """
    from vllm.triton_utils import dispatcher

    places = {name: dispatcher._resolve_kernel(name) for name in bodies}  # imports the modules, which hold kernels, too
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    rebind = reading(dispatcher._rebind_kernels, sys=types.SimpleNamespace(modules=modules))
    _take_back(rebind, dispatcher._registry)
    _replaced[:] = [(name, host, attribute, getattr(host, attribute)) for name, (host, attribute) in places.items()]
    reading(dispatcher.register_kernels, _rebind_kernels=rebind)(bodies)


def _take_back(rebind: Callable[[list[tuple[Any, Any]]], None], registry: dict[str, Any]) -> None:
    """Put the kernels that have bodies back into their places."""
    if _replaced:
        rebind([(getattr(host, attribute), kernel) for _, host, attribute, kernel in _replaced])
    for name, host, attribute, kernel in _replaced:
        setattr(host, attribute, kernel)
        registry.pop(name, None)


def route_by_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Give the runners of a model's mixtures of experts their routers with adapters; returns the model.

    Why: a runner holds its router, and ``LoRAModelManager`` puts the router with adapters into the layer that it has
    put around the runner, where nothing reads it: adapters of routers would be loaded and ignored. Versions: vLLM 0.32
    and 0.33. Scope: a module of the model's, for as long as it lives; no class.
    """
    from vllm.lora.layers import FusedMoEWithLoRA

    for layer in model.modules():
        router = layer._modules.get("gate") if isinstance(layer, FusedMoEWithLoRA) else None
        if router is not None:
            runner: Any = layer.base_layer
            runner.gate = router
    return model


def serve_argument_parser() -> Callable[..., Any]:
    """Return the function that adds the arguments of ``vllm serve`` to a parser.

    Why: its module moved. Versions: vLLM 0.32 has it in ``launchers``, 0.33 in ``common``.
    """
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    return make_arg_parser


def opening_endpoint(engine: Any, endpoint: Callable[..., Any]) -> tuple[str, Any]:
    """Return the name of the method of a trainer's `engine` that opens its endpoint, and a copy that opens `endpoint`.

    Why: it makes a group of NCCL by name. Versions: vLLM 0.32 does it in ``trainer_init``, 0.33 in a method of its own.
    """
    if hasattr(engine, "_open_trainer_endpoint"):
        return "_open_trainer_endpoint", reading(engine._open_trainer_endpoint, open_trainer_endpoint=endpoint)
    return "trainer_init", classmethod(reading(engine.trainer_init.__func__, open_trainer_endpoint=endpoint))


def top_k_top_p(states: Any, rows: torch.Tensor, requests: Any, vocabulary: int) -> tuple[Any, Any]:
    """Return what the V2 runner's sampling states say of top-k and top-p, each None where no request wants it.

    Why: vLLM 0.33 wants the vocabulary's size, too, and returns a third, for a Triton kernel. Versions: 0.32, 0.33.
    """
    code = states.get_top_k_top_p.__func__.__code__
    more = (vocabulary,) if code.co_argcount > 3 else ()
    k, p, *_ = states.get_top_k_top_p(rows, requests, *more)
    return k, p


def quantises_heads_of_drafters(speculation: Any) -> bool:
    """Whether a drafter's head is to be quantised. Why: a setting of vLLM 0.33. Versions: 0.32 does not have it."""
    return getattr(speculation, "draft_lm_head_quantization", None) is not None


def wants_one_kernel_a_layer(kernels: Any) -> bool:
    """Whether the configuration of `kernels` asks for that. Why: a setting of vLLM 0.33. Versions: 0.32 has it not."""
    return getattr(kernels, "monokernel", False)


def engine_arguments_in_progress() -> Any | None:
    """Return the ``EngineArgs`` whose ``create_engine_config`` is running in this thread, or None.

    Why: no hook of a platform is told which sizes of a batch the user gave and which vLLM chose; only the engine
    arguments know, until vLLM completes them. Versions: vLLM 0.32. Scope: nothing is replaced; the stack is read.
    """
    from vllm.engine.arg_utils import EngineArgs

    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is EngineArgs.create_engine_config.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def is_started_beside_its_server(parallel: Any) -> bool:
    """Say whether the server that starts a replica, among several, is on its host.

    Why: a replica of a dense model believes that it is alone. The store that the server opens for the ports of
    replicas is known to those that it starts itself, and with a dense model to no others. Versions: vLLM 0.32 and 0.33.
    """
    return bool(parallel._coord_store_port)


def holds_message(queue: Any) -> bool:
    """Return whether a message waits in a ``MessageQueue`` of this host.

    Why: its ``dequeue`` polls for a second before it sleeps, and no argument says otherwise; :func:`await_message`
    sleeps at once. Versions: vLLM 0.32, 0.33. Scope: nothing is replaced; what ``acquire_read`` looks at is read.
    """
    from vllm.distributed.device_communicators.shm_broadcast import memory_fence

    with queue.buffer.get_metadata(queue.current_idx) as flags:
        memory_fence()
        return bool(flags[0]) and not flags[queue.local_reader_rank + 1]


def await_message(queue: Any, seconds: float) -> None:
    """Sleep until the writer of a ``MessageQueue`` of this host says that it wrote, or somebody ends the queue.

    Returns after `seconds` at the latest; a message may have been seen before, so ask :func:`holds_message` again.
    Why: ``SpinCondition.wait`` does this only when nothing came for ``busy_loop_s``, a second, which is the default of
    an argument that nobody gives. Versions: vLLM 0.32, 0.33. Scope: nothing is replaced.
    """
    condition = queue._spin_condition
    events = dict(condition.poller.poll(timeout=max(1, int(seconds * 1e3))))
    if condition.local_notify_socket in events:
        condition.local_notify_socket.recv(copy=False)


def is_of_this_host(queue: Any) -> bool:
    """Return whether a ``MessageQueue`` is read from memory of this host. Why, versions: see :func:`holds_message`."""
    return bool(queue._is_local_reader)


def polls(queue: Any) -> bool:
    """Return whether ``dequeue`` of a ``MessageQueue`` would poll now. Why, versions: see :func:`await_message`."""
    condition = queue._spin_condition
    return is_of_this_host(queue) and bool(time.monotonic() <= condition.last_read + condition.busy_loop_s)


def process_of_this_call() -> Any:
    """Return the ``WorkerProc`` that is executing a call of its engine in this thread.

    Why: :mod:`npu_platform.distributed.calls` waits otherwise than its loop does, and a call is told of its worker
    only. Versions: vLLM 0.32, 0.33. Scope: nothing is replaced; the stack is read.

    Raises RuntimeError where none is.
    """
    from vllm.v1.executor.multiproc_executor import WorkerProc

    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is WorkerProc._execute_worker_rpc.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    msg = "no rank of vLLM's executors calls this."
    raise RuntimeError(msg)


def execute_call(process: Any, call: Any) -> None:
    """Execute a call of the engine of a ``WorkerProc`` and answer it. Why, versions: see above."""
    process._execute_worker_rpc(call)


def remove_name(queue: Any) -> None:
    """Remove the name of the shared memory of a ``MessageQueue``, if it has any, once all that use it have opened it.

    Why: Ray kills an engine's ranks at each end, and with them Python's process that would remove it. Versions: vLLM
    0.32, 0.33. Scope: nothing is replaced.
    """
    memory = getattr(getattr(queue, "buffer", None), "shared_memory", None)
    if memory is not None:
        Path("/dev/shm", memory.name).unlink(missing_ok=True)  # noqa: S108 - where Linux keeps it


class _CudaOnNpu:
    """``torch.npu``, whose own names also go by those of ``torch.cuda``."""

    CUDAGraph = torch.npu.NPUGraph

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.npu, name)


class _TorchOnNpu(types.ModuleType):
    """``torch``, with ``torch.npu`` under the name ``cuda``."""

    def __init__(self) -> None:
        super().__init__(torch.__name__)
        self.cuda = _CudaOnNpu()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH = _TorchOnNpu()


@contextlib.contextmanager
def _substituted(namespace: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Put `value` into a module's or a table's `namespace` while any thread is inside; the last one out undoes it."""
    key = id(namespace), name
    with _lock:
        threads, before = _inside.get(key, (0, namespace.get(name, _ABSENT)))
        _inside[key] = threads + 1, before
        namespace[name] = value
    try:
        yield
    finally:
        with _lock:
            threads, before = _inside.pop(key)
            if threads > 1:
                _inside[key] = threads - 1, before
            elif before is _ABSENT:
                del namespace[name]
            else:
                namespace[name] = before


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a function whose work npu does not need."""
