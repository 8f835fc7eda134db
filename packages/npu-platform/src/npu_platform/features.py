"""What the npu device cannot do yet: refused at start with the way out, or switched off where vLLM chose it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, get_args

import vllm.envs as vllm_envs
from vllm.logger import init_logger

from npu_platform import compat, config, runners, unsupported
from npu_platform.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.npu_platform.features")


def refuse_early(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedFeatureError for what vLLM would refuse later without the way out, or leave out in silence."""
    _refuse(chain(unsupported.needs_gpu(vllm_config), unsupported.limits_of_the_device(vllm_config)))


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedFeatureError with one sentence for each feature that is asked for and not there."""
    _refuse(unsupported.refusals(vllm_config))


def refuse_states_without_kernels(layers: Mapping[str, object], with_drafts: bool) -> None:
    """Raise UnsupportedFeatureError if a layer of a loaded model keeps a state that no npu kernel updates.

    With drafts a state must be kept for each token of a step, until it is known which of them are accepted.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    kept = [layer for layer in layers.values() if isinstance(layer, MambaBase)]
    kinds = {type(layer).__name__ for layer in kept}
    kinds -= {type(layer).__name__ for layer in kept if getattr(layer, "has_npu_kernels", False)}
    if kinds and (why := runners.without_kernels()) is not None:
        msg = (
            f"Layers of the kind {', '.join(sorted(kinds))} run vLLM's Triton kernels, and {why}, or serve a model of "
            "Mamba, Mamba-2, short convolution or Qwen's gated delta net."
        )
        raise UnsupportedFeatureError(msg)
    kinds = {type(layer).__name__ for layer in kept if not getattr(layer, "rolls_back", False)}
    if with_drafts and kinds:
        msg = f"The states of {', '.join(sorted(kinds))} cannot be rolled back on npu: leave out --speculative-config."
        raise UnsupportedFeatureError(msg)


def disable_prefix_caching_of_states(vllm_config: VllmConfig) -> None:
    """Switch prefix caching off where drafts meet states that are not copied with them.

    These are the states of models without attention, since vLLM copies those of hybrids only, and all on the V2 runner,
    whose kernels look for the states of drafts elsewhere than npu-ops' layers leave them.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model is None or not (model.is_hybrid or model.is_attention_free) or not cache.enable_prefix_caching:
        return
    if vllm_config.speculative_config is None or (model.is_hybrid and not config.chose_v2_runner()):
        return
    logger.warning("Prefix caching is off: the states of %s are not cached with speculation.", model.architecture)
    cache.enable_prefix_caching = False
    cache.mamba_cache_mode = "none"
    cache.mamba_block_size = model.max_model_len


def end_with_rotations(vllm_config: VllmConfig) -> None:
    """Lower the longest length that vLLM derived to the positions that it has rotations for: later tokens would be NaN.

    One that the user named stays, to be refused by name.
    """
    model = vllm_config.model_config
    if model is None or (end := unsupported.end_of_rotations(model)) is None:
        return
    if model.original_max_model_len in (None, -1):
        logger.warning("max_model_len is %d, not %d: vLLM has no rotations beyond.", end, model.max_model_len)
        model.max_model_len = end


def drop_attention_of_gpus(vllm_config: VllmConfig) -> None:
    """Forget the attention backends that vLLM's rules for a model chose among those of GPUs, as for Gemma 4.

    One that the user named stays, to be refused by name.
    """
    arguments, attention = compat.engine_arguments_in_progress(), vllm_config.attention_config
    if arguments is None:
        return
    named = arguments.attention_backend is not None or arguments.attention_config.backend is not None
    if attention.backend is not None and not named:
        logger.info("vLLM chose %s for this model; npu has its own attention.", attention.backend.name)
        attention.backend = None
    media = vllm_config.model_config.multimodal_config if vllm_config.model_config is not None else None
    if media is not None and arguments.mm_encoder_attn_backend is None:
        media.mm_encoder_attn_backend = None


def keep_images_whole(vllm_config: VllmConfig) -> None:
    """Compute each image in one step where its tokens see each other: those of a later step would not be there yet."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if model is not None and model.is_mm_prefix_lm and scheduler.is_multimodal_model:
        scheduler.disable_chunked_mm_input = True


def keep_states_in_float32(vllm_config: VllmConfig) -> None:
    """Do so in batch-invariant mode: a narrower state would be rounded wherever a prompt is cut."""
    if vllm_envs.VLLM_BATCH_INVARIANT and vllm_config.cache_config.mamba_ssm_cache_dtype == "auto":
        vllm_config.cache_config.mamba_ssm_cache_dtype = "float32"


def choose_sleep_mode(vllm_config: VllmConfig) -> None:
    """Let the device's own pools sleep, where the user named no other of vLLM's registered ways."""
    model = vllm_config.model_config
    if model is not None and model.enable_sleep_mode and model.sleep_mode_backend == "cumem":
        model.sleep_mode_backend = "npu"


def choose_loader(vllm_config: VllmConfig) -> None:
    """Let a plugin's method of quantisation read its checkpoints by its own loader, if it has one of the same name.

    The user may have named another one.
    """
    from vllm.model_executor.layers.quantization import QuantizationMethods

    model, load = vllm_config.model_config, vllm_config.load_config
    method = None if model is None else model.quantization
    if (
        method is None
        or method in get_args(QuantizationMethods)
        or load.load_format not in ("auto", "hf", "safetensors")
    ):
        return
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    try:
        get_model_loader(LoadConfig(load_format=method))
    except ValueError:  # which vLLM raises for a name that nobody registered
        return
    load.load_format = method


def disable_fusion_passes(vllm_config: VllmConfig) -> None:
    """Switch vLLM's fusion passes off: their classes are imported on CUDA and XPU only, so they would not be found.

    So are kernels that Inductor combines of several, which vLLM asks for: they are Triton's.
    """
    compilation = vllm_config.compilation_config
    for name in ("combo_kernels", "benchmark_combo_kernel"):
        compilation.inductor_compile_config[name] = False
    for name in vars(compilation.pass_config):
        if name.startswith("fuse_") and getattr(compilation.pass_config, name):
            setattr(compilation.pass_config, name, False)
    if compilation.compile_sizes is None:
        compilation.compile_sizes = []
    if compilation.cudagraph_capture_sizes is None:
        compilation.cudagraph_capture_sizes = []


def _refuse(sentences: Iterable[str]) -> None:
    if said := " ".join(sentences):
        raise UnsupportedFeatureError(said)
