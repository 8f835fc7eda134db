"""Owns which of vLLM's two model runners an engine has, where the user left that open, and what V2 does not have."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from vllm import envs as vllm_envs
from vllm.logger import init_logger

from npu_platform import config
from npu_platform.errors import ConfigurationError
from npu_platform.triton import availability

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.config import ModelConfig, VllmConfig

__all__ = [
    "begin_choice",
    "choose",
    "counts_no_tokens",
    "lacking_in_v2",
    "refuse_several",
    "without_kernels",
    "without_triton",
]

logger = init_logger("vllm.npu_platform.runners")


def begin_choice() -> None:
    """Forget the choice of an engine before; it is V1 where the user chose no runner, and vLLM is to have no Triton."""
    config.begin_choice_of_runner()
    why = availability.why_not_for_vllm()
    if config.is_runner_open() and why is not None:
        config.choose_runner(v2=False, why=why)
        vllm_envs.disable_envs_cache()


def choose(vllm_config: VllmConfig) -> None:
    """Settle the runner of this configuration's engine and of its processes; the log says which one, and why.

    The user's choice stays (``VLLM_USE_V2_MODEL_RUNNER``). Otherwise it is V2 where Triton is there and V2 knows the
    configuration, else V1.
    """
    if config.is_runner_open():
        _settle(vllm_config, _against_v2(vllm_config))
    name = "V2" if config.chose_v2_runner() else "V1"
    logger.info_once("npu takes vLLM's %s model runner: %s.", name, config.why_this_runner())


def lacking_in_v2(vllm_config: VllmConfig) -> list[str]:
    """Return what the configuration asks for and V2 does not have, as vLLM's own words or like them."""
    lacking: list[str] = vllm_config._get_v2_model_runner_unsupported_features()
    if vllm_config.model_config is not None:
        lacking += _processors_of_v1(vllm_config.model_config)
    if vllm_config.cache_config.use_replayssm and vllm_config.mamba_config.backend.name == "TRITON":
        lacking.append("ReplaySSM by Triton")
    return lacking


def refuse_several(v2_of_ranks: Sequence[bool]) -> None:
    """Raise ConfigurationError unless all ranks have one runner: each host chooses, and one may lack a compiler."""
    if len(set(v2_of_ranks)) > 1:
        without = [str(rank) for rank, v2 in enumerate(v2_of_ranks) if not v2]
        msg = (
            f"Not all ranks have the same of vLLM's model runners, V1 is that of {', '.join(without)}: the log of each "
            "host says why. Set VLLM_USE_V2_MODEL_RUNNER to the same on every host, 0 for V1."
        )
        raise ConfigurationError(msg)


def counts_no_tokens() -> str | None:
    """Return why V2 would never end a request here: its device keeps how many tokens that has; None: it would."""
    null = config.device_choice() == "null"
    return "The V2 model runner counts tokens on the device, and the null device computes nothing" if null else None


def without_triton() -> str | None:
    """Return why vLLM has no Triton kernels for npu in this process; None: it has them."""
    from vllm.triton_utils import HAS_TRITON  # which asks for the platform, and this module is imported with that

    if (missing := availability.missing()) is not None:
        return missing
    return None if HAS_TRITON else "npu was not Triton's one device when vLLM was imported"


def without_kernels() -> str | None:
    """Return why this engine does not run layers that are Triton kernels, with a way out; None: it does."""
    if config.asks_for_triton() is False:
        return f"{config.what_leaves_triton_out()} leaves them out: set TRITON_DEFAULT_BACKEND=npu"
    why = availability.why_not_for_vllm() or without_triton()
    return None if why is None else f"{why}: mend that before vLLM is imported"


def _against_v2(vllm_config: VllmConfig) -> str | None:
    if (missing := without_triton()) is not None:
        return missing
    if config.cxx_compiler() is None:  # where Triton was asked for, or there was a compiler when the choice began
        return "there is no C++ compiler for kernels that are not in the cache"
    if (counts := counts_no_tokens()) is not None:
        return counts
    lacking = [*lacking_in_v2(vllm_config), *_left_out_by_v2(vllm_config)]
    return f"V2 does not have {', '.join(lacking)}" if lacking else None


def _left_out_by_v2(vllm_config: VllmConfig) -> Iterator[str]:
    """Name what V2 runs without, where V1 has it (``features.disable_prefix_caching_of_states``)."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model is not None and model.is_hybrid and cache.enable_prefix_caching and vllm_config.speculative_config:
        yield "prefix caching of states beside drafts"


def _settle(vllm_config: VllmConfig, against_v2: str | None) -> None:
    why = against_v2 or "Triton is there, and V2 knows this configuration"
    config.choose_runner(v2=against_v2 is None, why=why, triton=without_triton() is None)
    vllm_envs.disable_envs_cache()  # an engine before this one in the process has filled it
    if against_v2 and vllm_config.parallel_config.pipeline_parallel_size > 1:
        vllm_config.scheduler_config.async_scheduling = False  # vLLM thought of V2, which has it with stages


def _processors_of_v1(model: ModelConfig) -> Iterator[str]:
    """Name the processors of logits, if one is not of V2's class."""
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    given = model.logits_processors or ()
    if not given and not importlib.metadata.entry_points(group=LOGITSPROCS_GROUP):
        return
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator

    try:
        build_custom_logits_processors_params_validator(given)
    except ValueError as error:
        yield f"logits processors of V1's class ({error})"
