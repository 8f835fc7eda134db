"""How steps are scheduled on the software NPU, where the user said nothing: how many tokens and requests, and when.

vLLM chooses sizes by the device's memory, which it takes for that of a GPU: a host with 88 GiB gets an H100's 8,192
tokens a step, during which every other request waits for seconds. What computes here is the host's cores.

And it schedules a step while the one before runs, to hide its own work behind the device's. The software NPU does its
work on the thread that submits it: where that is the scheduler's own, nothing is hidden, and every token is handed out
when the next step has run, too.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from npu_platform import compat, config
from npu_platform.config import NPUConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.npu_platform.scheduling")

TOKENS_A_CORE = 512
"""About half a second of prefill of a model of 0.6 billion weights."""
REQUESTS_A_CORE = 64
_FEWEST_TOKENS, _FEWEST_REQUESTS = 1024, 128


@dataclass(frozen=True)
class _Asked:
    """What of these the user gave, and in which engine arguments."""

    arguments: Any
    tokens: bool
    requests: bool
    ahead: bool


_asked: ContextVar[_Asked | None] = ContextVar("_asked", default=None)


def remember_what_the_user_gave() -> None:
    """Note what the engine arguments hold that vLLM is about to complete; later all looks alike."""
    arguments = compat.engine_arguments_in_progress()
    if arguments is not None:
        given = (arguments.max_num_batched_tokens, arguments.max_num_seqs, arguments.async_scheduling)
        _asked.set(_Asked(arguments, *(each is not None for each in given)))


def choose_for_the_host(vllm_config: VllmConfig) -> None:
    """Lower the sizes that vLLM chose to what the cores can do, and schedule nothing ahead where that hides nothing.

    What the user gave stays, and so do sizes where he asked for throughput.
    """
    asked = _asked.get()
    if asked is None or asked.arguments is not compat.engine_arguments_in_progress():
        return  # a configuration built by hand: all of it was given
    config.require_devices(torch.npu.device_count())
    if torch.npu.get_device_properties().driver != "simulator":
        return
    if vllm_config.performance_mode != "throughput":
        _choose_sizes(vllm_config, asked)
    if not asked.ahead and vllm_config.scheduler_config.async_scheduling and _schedules_where_it_computes(vllm_config):
        vllm_config.scheduler_config.async_scheduling = False
        logger.info_once(
            "Steps are not scheduled ahead: this device computes on the scheduler's own thread, and tokens would be "
            "handed out a step late. --async-scheduling does it all the same."
        )


def _choose_sizes(vllm_config: VllmConfig, asked: _Asked) -> None:
    scheduler, cores = vllm_config.scheduler_config, _cores(vllm_config)
    before = (scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    if not asked.requests:
        fewest = max(_FEWEST_REQUESTS, scheduler.max_num_active_seqs or 0)
        scheduler.max_num_seqs = min(scheduler.max_num_seqs, max(fewest, REQUESTS_A_CORE * cores))
    if not asked.tokens and _may_be_cut(vllm_config):
        wanted = max(_fewest_tokens(vllm_config), TOKENS_A_CORE * cores)
        scheduler.max_num_batched_tokens = min(scheduler.max_num_batched_tokens, wanted)
        scheduler.max_num_encoder_input_tokens = scheduler.max_num_batched_tokens
        scheduler.encoder_cache_size = scheduler.max_num_batched_tokens
    after = (scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    if after != before:
        logger.info(
            "A step takes %d tokens and %d requests at most, for %d cores (vLLM's choice for a GPU with this memory: "
            "%d and %d); set --max-num-batched-tokens and --max-num-seqs for others.",
            *(*after, cores, *before),
        )


def _schedules_where_it_computes(vllm_config: VllmConfig) -> bool:
    """Say whether the engine's scheduler and its worker are one process, as where an engine has one rank."""
    from vllm.v1.executor import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return issubclass(Executor.get_class(vllm_config), UniProcExecutor)


def _cores(vllm_config: VllmConfig) -> int:
    """Return the threads that compute for one engine: those of its ranks, or its share of the process's cores."""
    parallel = vllm_config.parallel_config
    threads = NPUConfig.from_additional_config(vllm_config.additional_config).num_threads
    if threads is not None:
        return threads * parallel.world_size
    return max(1, torch.npu.get_device_properties().multi_processor_count // max(1, parallel.data_parallel_size_local))


def _may_be_cut(vllm_config: VllmConfig) -> bool:
    """Say whether prompts may be prefilled in parts; otherwise a step must hold the longest one, or a whole image."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    whole = scheduler.disable_chunked_mm_input or (model is not None and model.is_mm_prefix_lm)
    return scheduler.enable_chunked_prefill and not whole


def _fewest_tokens(vllm_config: VllmConfig) -> int:
    """Return what a step must hold: a decode of every request with its drafts, and what the user schedules."""
    scheduler = vllm_config.scheduler_config
    decodes = scheduler.max_num_seqs * vllm_config.uniform_decode_query_len
    return max(_FEWEST_TOKENS, decodes, scheduler.max_num_scheduled_tokens or 0)
