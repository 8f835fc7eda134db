"""NPUWorker: one npu device's life cycle under vLLM: set-up, memory budget, warm-up."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import vllm.envs as vllm_envs
from vllm.distributed import get_tp_group, get_world_group
from vllm.distributed.parallel_state import get_inner_dp_world_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory

from npu_platform import batch_invariance, compat, first_touch, numa, openmp, plan, runners, sleep_mode, triton_models
from npu_platform.attention.registration import backend_for
from npu_platform.config import NPUConfig, variables_set
from npu_platform.distributed import beats, host_watch, idle_threads, is_multiprocessing, stop_watch
from npu_platform.errors import ConfigurationError, UnsupportedFeatureError
from npu_platform.implementations import LayerKind, of_model, text
from npu_platform.info import registered_ops
from npu_platform.memory_ledger import MemoryLedger, available_memory, cache_size_named, host_memory, tier_bytes
from npu_platform.sleep_mode import NPUSleepMode
from npu_platform.start_times import StartTimes
from npu_platform.triton import availability, build
from npu_platform.warm_up import warm_up

if TYPE_CHECKING:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes

    from npu_platform.model_runner import NPUModelRunner
    from npu_platform.v2.model_runner import NPUModelRunnerV2

_Mine = TypeVar("_Mine")
logger = init_logger("vllm.npu_platform.worker")

Processors = tuple[str, frozenset[int]]
"""What :func:`npu_platform.numa.where` returns."""

_MORE_DEVICES = (
    "lower --tensor-, --pipeline- or --data-parallel-size, name other --device-ids, or more in NPU_VISIBLE_DEVICES; "
    "on the software NPU set NPU_SIMULATOR_DEVICES to"
)


class NPUWorker(Worker):
    """vLLM's worker on an npu device, with its V1 or its V2 model runner; what is not here is inherited."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's worker; arguments are those of ``vllm.v1.worker.gpu_worker.Worker``."""
        self.start_times = StartTimes()
        # A start collects garbage a dozen times, which took 0.3 s each to look through all that was imported.
        gc.freeze()
        with compat.profiler_knows_npu():
            super().__init__(*args, **kwargs)
        self.npu_config = NPUConfig.from_additional_config(self.vllm_config.additional_config)
        self._cache_bytes = 0
        self._hosts: host_watch.HostWatch | None = None
        self._stopped: stop_watch.StopWatch | None = None
        self._first_touch: first_touch.FirstTouch | None = None

    def init_device(self) -> None:
        """Take this rank's device, join the process groups, measure the memory and build the model runner.

        Raises ConfigurationError when there are fewer devices than ranks, or a launcher has started another number.
        """
        with self.start_times.part("device"):
            self._init_device()

    def _init_device(self) -> None:
        self._check_launcher()
        self.local_rank += self._first_of_engine()
        self.device = torch.device("npu", self._visible_device())
        torch.accelerator.set_device_index(self.device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        with compat.without_triton_batch_invariance(), idle_threads.seldom_awake():
            init_worker_distributed_environment(
                self.vllm_config,
                self.rank,
                self.distributed_init_method,
                self.device.index,  # of a platform out of tree, groups take their device from it
                current_platform.dist_backend,
            )
        places = _of_all_ranks(stop_watch.here(self.parallel_config.data_parallel_index))
        self._hosts = self._watch_hosts(places)
        runners.refuse_several(_of_all_ranks(self.use_v2_model_runner))
        self._stopped = self._watch_for_stops(places)
        if self.parallel_config.use_ray:
            compat.remove_name(get_tp_group().mq_broadcaster)
        torch.npu.set_num_threads(self._num_threads(*_where_ranks_are()))
        if vllm_envs.VLLM_BATCH_INVARIANT:
            batch_invariance.register_products()
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.accelerator.empty_cache()
        weights_elsewhere = get_model_loader(self.load_config).get_external_weight_memory(self.vllm_config)
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config, weights_elsewhere)
        self._init_workspace_and_model_runner()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the weights, then give torch's CPU kernels their threads back.

        vLLM sets torch to one thread for serving, because OpenMP threads spin; on the software NPU those threads
        are the device's, and :mod:`npu_platform.openmp` makes them sleep instead.
        """
        if self.vllm_config.weight_transfer_config is not None:
            from npu_platform import weight_transfer  # noqa: F401 - registers the engine
        if availability.for_vllm():
            if self.use_v2_model_runner:
                from npu_platform.triton import early

                early.hash_triton()  # while the weights are read
            triton_models.register_models()
            triton_models.register_layers()
        with self.start_times.part("model and weights"):
            super().load_model(load_dummy_weights=load_dummy_weights)
        openmp.sleep_after_loops()
        torch.set_num_threads(torch.npu.get_num_threads())
        with self.start_times.part("layers measured"), self._maybe_get_memory_pool_context("weights"):
            for model in self.model_runner.models():
                warm_up(model, self.scheduler_config.max_num_batched_tokens)
        logger.info("npu layers:\n%s", "\n".join(text(self.layer_implementations())))

    def determine_available_memory(self) -> int:
        """Return the bytes that a run of the largest step leaves for the KV cache."""
        with self.start_times.part("memory profile"):
            return super().determine_available_memory()

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Name those of the model's attention where a pipeline stage has no layer of it: all stages have to agree."""
        named: list[str] = super().get_supported_kv_cache_layouts()
        if self.parallel_config.pipeline_parallel_size == 1 or self.model_config.is_attention_free:
            return named
        of_attention = backend_for(self.model_config.use_mla)[1].supported_kv_cache_layouts()
        if of_attention is None:  # latents have no preference, and all stages say so
            return named
        return [layout.name for layout in of_attention if layout.name in named]

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache. Raises torch.OutOfMemoryError, which names the flag that made it so large."""
        before = torch.npu.memory_allocated(self.device)
        with self.start_times.part("KV cache"), cache_size_named(self.cache_config):
            super().initialize_from_config(kv_cache_config)
        self._cache_bytes = torch.npu.memory_allocated(self.device) - before

    def sleep(self, level: int = 1) -> None:
        """Sleep as vLLM's worker; memory that is given back is not touched ahead any more."""
        self._touch_no_more()
        super().sleep(level)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Capture the decode graphs and run the sampler once."""
        short = compat.short_warm_up() if self.use_v2_model_runner else contextlib.nullcontext()
        named = cache_size_named(self.cache_config)
        with compat.without_kernel_warmup(), short, named, self.start_times.part("graphs and sampler"):
            times = super().compile_or_warm_up_model()
        compat.end_quick_sources()
        if self.model_config.sleep_mode_offload_cudagraph and isinstance(self.sleep_mode_backend, NPUSleepMode):
            self.sleep_mode_backend.add_graphs(current_platform.get_global_graph_pool())
        logger.info("npu worker: %s", "; ".join(f"{name}={value}" for name, value in self.summary().items()))
        ledger = self.memory_ledger()
        logger.info("npu worker: %s", ledger.text())
        if (problem := ledger.problem()) is not None:
            logger.warning(problem)
        if (compiled := build.what_was_compiled()) is not None:
            logger.info("npu worker: %s", compiled)
        logger.info("npu worker: up after %s", self.start_times.text())
        self._say_what_ranks_got()
        if ledger.on_host:
            self._touch_cache_ahead()
        return times

    def summary(self) -> dict[str, str]:
        """Return what runs where in this worker: device, dtype, ops and graphs; `npu demo` prints it from the log."""
        native = sum(op.npu == "native kernel" for op in registered_ops())
        return {
            "device": f"{self.device} ({torch.npu.get_device_name(self.device)})",
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "ops": f"npu-ops, {native} native kernels" if native else "plain torch",
            "graphs": self._graphs(),
        }

    def _graphs(self) -> str:
        compilation = self.vllm_config.compilation_config
        sizes = compilation.cudagraph_capture_sizes
        if not compilation.cudagraph_mode or not sizes:
            return "none"
        if compilation.cudagraph_mode.mixed_mode():
            return f"steps of up to {max(sizes)} tokens"
        return f"decode at batch {', '.join(map(str, sizes))}"

    def memory_ledger(self) -> MemoryLedger:
        """Return what this rank, the ranks beside it and a host tier take of their devices and of the host."""
        parallel = self.parallel_config
        return MemoryLedger(
            weights=int(self.model_runner.model_memory_usage),
            cache=self._cache_bytes,
            device=torch.npu.memory_reserved(self.device),
            tier=tier_bytes(self.vllm_config.kv_transfer_config),
            ranks=parallel.local_world_size * parallel.data_parallel_size_local,
            on_host=torch.npu.get_device_properties(self.device).driver == "simulator",
            host=host_memory(),
        )

    def layer_implementations(self) -> list[LayerKind]:
        """Return which implementation each layer of the loaded model runs; ``collective_rpc`` reaches it."""
        return of_model(self.model_runner.get_model())

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Run a step; as vLLM's worker, but that an error of a rank that does not answer for the step is told, too."""
        try:
            return super().execute_model(scheduler_output)
        except Exception as error:
            self._end_if_nobody_hears(error)
            raise

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the step's tokens; errors as of :meth:`execute_model`."""
        try:
            return super().sample_tokens(grammar_output)
        except Exception as error:
            self._end_if_nobody_hears(error)
            raise

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; raises UnsupportedFeatureError while its place on the device sleeps."""
        self._refuse_asleep("adapters are loaded")
        return bool(super().add_lora(lora_request))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter on the device; raises UnsupportedFeatureError while its place there sleeps."""
        self._refuse_asleep("adapters are pinned")
        return bool(super().pin_lora(lora_id))

    def shutdown(self) -> None:
        """Release what the worker holds."""
        if self._hosts is not None:
            self._hosts.close()
        if self._stopped is not None:
            self._stopped.close()
        self._touch_no_more()
        super().shutdown()

    def profile(self, *args: Any, **kwargs: Any) -> None:
        """Start or stop the torch profiler; arguments are those of vLLM's worker."""
        with compat.profiler_knows_npu():
            super().profile(*args, **kwargs)

    def _refuse_asleep(self, what: str) -> None:
        backend = self._sleep_mode_backend
        if isinstance(backend, NPUSleepMode) and backend.sleeps("weights"):
            msg = f"The engine sleeps: wake it up (/wake_up) before {what}."
            raise UnsupportedFeatureError(msg)

    def _touch_cache_ahead(self) -> None:
        """Take memory for the first requests, a quarter at most of what the host has to give."""
        self._touch_no_more()
        ranks = self.parallel_config.local_world_size * self.parallel_config.data_parallel_size_local
        caches = first_touch.ranges_of(self.model_runner.kv_caches)
        self._first_touch = first_touch.FirstTouch(caches, available_memory() // (4 * ranks))

    def _touch_no_more(self) -> None:
        if self._first_touch is not None:
            self._first_touch.stop()
            self._first_touch = None

    def _watch_hosts(self, of_all: list[stop_watch.Place]) -> host_watch.HostWatch | None:
        """Let the first ranks of an engine's hosts notice when another one is gone; all ranks call this.

        Where replicas share experts, a host that is gone ends the collectives of all others.
        """
        parallel, when_gone = self.parallel_config, host_watch.end_this_process
        if is_multiprocessing(parallel) and parallel.nnodes_within_dp > 1:
            group = get_inner_dp_world_group()
            firsts = list(range(0, group.world_size, parallel.local_world_size))
        elif parallel.use_ray:
            group, firsts = get_world_group(), stop_watch.first_on_each_host(of_all)
            when_gone = host_watch.end_this_process_if_it_stays
        else:
            return None
        mine = beats.address_of_this_host(parallel)
        return host_watch.join(group, firsts, mine, when_gone) if len(firsts) > 1 else None

    def _watch_for_stops(self, of_all: list[stop_watch.Place]) -> stop_watch.StopWatch | None:
        """Let the first rank of a host look after the engine and its ranks there; all ranks call this."""
        parallel, seconds = self.parallel_config, self.npu_config.stopped_seconds
        mine = of_all[get_world_group().rank_in_group]
        ranks, heard = stop_watch.on_my_host(mine, of_all), beats.sockets(get_world_group(), parallel, of_all)
        theirs = stop_watch.belongs_to_an_engine() or parallel.use_ray
        if seconds is None or not theirs or mine.process != ranks[0]:
            for beat in heard:
                beat.close()
            return None
        engine = [os.getppid()] if is_multiprocessing(parallel) else []
        starter = 0 if parallel.use_ray else stop_watch.starter_of((*engine, mine.process)[0])
        return stop_watch.StopWatch([*engine, *ranks], seconds, starter, heard, ranks_from=len(engine))

    def _end_if_nobody_hears(self, error: Exception) -> None:
        """End this rank on an error in a step for which another one answers.

        vLLM's executors pass on the errors of the rank that answers, the first of the last stage, and log those of the
        others: their engine would wait. They do watch whether these live. Raises SystemExit.
        """
        parallel = self.parallel_config
        answers = parallel.world_size - parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        watched = is_multiprocessing(parallel) or parallel.use_ray
        if watched and self.rank % parallel.world_size != answers:
            logger.error("rank %d ends, and with it the engine, since its step failed", self.rank, exc_info=error)
            raise SystemExit(1) from error

    def _say_what_ranks_got(self) -> None:
        """Let the first rank of a group log what each has of its host: the table of ``npu doctor --plan``.

        Replicas of a dense model are groups of their own, and each logs its ranks.
        """
        world, parallel = get_world_group(), self.parallel_config
        stage, part = divmod(self.rank % parallel.world_size, parallel.tensor_parallel_size)
        memory = int(self.requested_memory)
        nodes, threads = tuple(numa.nodes()), torch.npu.get_num_threads()
        host = socket.gethostname() if parallel.nnodes > 1 else ""
        mine = plan.Rank(parallel.data_parallel_index, stage, part, self.device.index, nodes, threads, memory, host)
        of_all = _of_all_ranks(mine)
        if world.rank_in_group == 0:
            logger.info("npu ranks:\n%s", plan.text(of_all))

    def _make_model_runner(self) -> NPUModelRunner | NPUModelRunnerV2:
        if self.use_v2_model_runner and self.vllm_config.is_mm_encoder_only:
            from npu_platform.v2.encoder_model_runner import NPUEncoderModelRunner

            return NPUEncoderModelRunner(self.vllm_config, self.device)
        if self.use_v2_model_runner:
            from npu_platform.v2.model_runner import NPUModelRunnerV2

            return NPUModelRunnerV2(self.vllm_config, self.device)
        from npu_platform.model_runner import NPUModelRunner

        return NPUModelRunner(self.vllm_config, self.device)

    @property
    def sleep_mode_backend(self) -> SleepModeBackend:
        """What sleeps; vLLM's factory makes it at the first use."""
        sleep_mode.register()
        return super().sleep_mode_backend

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[None]:
        # vLLM asks for a sleep-mode allocator here on every device that it does not know, even with sleep off.
        if not self.model_config.enable_sleep_mode or not isinstance(self.sleep_mode_backend, NPUSleepMode):
            return contextlib.nullcontext()
        folder = self.npu_config.sleep_folder
        self.sleep_mode_backend.folder = None if folder is None else Path(folder)
        return self.sleep_mode_backend.memory_of(tag)

    def _first_of_engine(self) -> int:
        """Return the first of this engine's places among the devices that its data-parallel replicas share, else 0."""
        parallel = self.parallel_config
        assigned = parallel.assigned_physical_gpu_ids
        if parallel.use_ray or parallel.distributed_executor_backend == "external_launcher":
            return 0
        if parallel.data_parallel_backend == "ray" or parallel.nnodes_within_dp > 1:
            return 0
        if assigned is not None and len(assigned) <= parallel.local_world_size:
            return 0  # vLLM has cut the list for this engine
        replica = parallel.data_parallel_rank_local
        return (parallel.data_parallel_index if replica is None else replica) * parallel.world_size

    def _check_launcher(self) -> None:
        """Raise ConfigurationError where torchrun has started more or fewer ranks than there are: they would wait."""
        parallel, started = self.parallel_config, os.environ.get("WORLD_SIZE")
        ranks = parallel.world_size
        if parallel.distributed_executor_backend != "external_launcher" or started in (None, str(ranks)):
            return
        msg = (
            f"the launcher has started {started} processes (WORLD_SIZE), and the layout has {ranks} ranks: start as "
            f"many (torchrun --nproc-per-node {ranks}, on one host), or change --tensor-, --pipeline- or "
            "--data-parallel-size."
        )
        raise ConfigurationError(msg)

    def _visible_device(self) -> int:
        """Return the ordinal in this process of the device that vLLM or ``--device-ids`` assigned to this rank.

        Raises ConfigurationError when that device is not there.
        """
        assigned, count = self.parallel_config.assigned_physical_gpu_ids, torch.accelerator.device_count()
        if assigned is not None:
            set_assigned_physical_gpu_ids(assigned)
        if self.local_rank >= (count if assigned is None else len(assigned)):
            there = f"this process sees {count}" if assigned is None else f"--device-ids assigns {assigned}"
            needed = max(self.local_rank + 1, self.parallel_config.local_world_size)
            msg = (
                f"rank {self.local_rank} of this host needs an npu device of its own, but {there}: {_MORE_DEVICES} "
                f"at least {needed}."
            )
            raise ConfigurationError(msg)
        device = current_platform.logical_device_id_to_visible_device_id(self.local_rank)
        if device >= count:
            msg = f"npu device {device} is not there, this process sees {count}: {_MORE_DEVICES} at least {device + 1}."
            raise ConfigurationError(msg)
        return device

    def _num_threads(self, mine: Processors, of_all: list[Processors]) -> int:
        """Return the threads of this rank: the setting, the variable, or its share of the cores that it may use."""
        if self.npu_config.num_threads is not None:
            return self.npu_config.num_threads
        environ = variables_set()
        if "NPU_NUM_THREADS" in environ:
            return torch.npu.get_num_threads()
        share = numa.cores_of_rank(mine, of_all)
        if OMP_NUM_THREADS_SET_BY_VLLM in environ:
            # Replicas of a dense model do not know of each other, but what vLLM sets for their start counts them.
            share = min(share, int(environ["OMP_NUM_THREADS"]))
        return max(1, share)


def _where_ranks_are() -> tuple[Processors, list[Processors]]:
    """Return the host and the processors of this rank, and of all ranks of its group."""
    mine = numa.where()
    return mine, _of_all_ranks(mine)


def _of_all_ranks(mine: _Mine) -> list[_Mine]:
    """Return what each rank of the group gave, in the order of the ranks."""
    world = get_world_group()
    of_all = [mine] * world.world_size
    torch.distributed.all_gather_object(of_all, mine, group=world.cpu_group)
    return of_all
