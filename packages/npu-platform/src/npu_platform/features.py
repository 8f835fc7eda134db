"""What the npu device cannot do yet: each feature is refused at start, by name, with the way out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import vllm.envs as vllm_envs
from vllm.logger import init_logger

from npu_platform.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.npu_platform.features")

_GPU_MODELS = "vllm.models."  # where vLLM keeps models apart by the maker of the GPU
_SPECULATION = ("ngram",)
_SUM_OF_TWO = 2  # is the same in either order


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedFeatureError with one sentence for each feature that is asked for and not there."""
    refusals = [*_model(vllm_config), *_parallel(vllm_config), *_engine(vllm_config)]
    if vllm_envs.VLLM_BATCH_INVARIANT:
        refusals += _batch_invariance(vllm_config)
    if refusals:
        raise UnsupportedFeatureError(" ".join(refusals))


def refuse_states_without_kernels(layers: Mapping[str, object]) -> None:
    """Raise UnsupportedFeatureError if a layer of a loaded model keeps a state that no npu kernel updates."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    kinds = {type(layer).__name__ for layer in layers.values() if isinstance(layer, MambaBase)}
    kinds -= {type(layer).__name__ for layer in layers.values() if getattr(layer, "has_npu_kernels", False)}
    if kinds:
        msg = (
            f"Layers of the kind {', '.join(sorted(kinds))} have no npu kernels: serve a model of Mamba, Mamba-2, "
            "short convolution or Qwen's gated delta net."
        )
        raise UnsupportedFeatureError(msg)


def disable_prefix_caching_of_states(vllm_config: VllmConfig) -> None:
    """Switch prefix caching off where layers keep a state: vLLM asks for it by default, and no kernel copies states."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model is None or not (model.is_hybrid or model.is_attention_free) or not cache.enable_prefix_caching:
        return
    logger.warning("Prefix caching is off: the states of %s are not cached on npu yet.", model.architecture)
    cache.enable_prefix_caching = False
    cache.mamba_cache_mode = "none"
    cache.mamba_block_size = model.max_model_len


def keep_states_in_float32(vllm_config: VllmConfig) -> None:
    """Do so in batch-invariant mode: a narrower state would be rounded wherever a prompt is cut."""
    if vllm_envs.VLLM_BATCH_INVARIANT and vllm_config.cache_config.mamba_ssm_cache_dtype == "auto":
        vllm_config.cache_config.mamba_ssm_cache_dtype = "float32"


def disable_fusion_passes(vllm_config: VllmConfig) -> None:
    """Switch vLLM's fusion passes off: their classes are imported on CUDA and XPU only, so they would not be found."""
    compilation = vllm_config.compilation_config
    for name in vars(compilation.pass_config):
        if name.startswith("fuse_") and getattr(compilation.pass_config, name):
            setattr(compilation.pass_config, name, False)
    if compilation.compile_sizes is None:
        compilation.compile_sizes = []
    if compilation.cudagraph_capture_sizes is None:
        compilation.cudagraph_capture_sizes = []


def _model(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    if model is None:
        return
    yield from _code_for_gpus(model)
    if model.is_moe:
        yield from _experts(vllm_config)
    lora = vllm_config.lora_config
    if lora is not None and lora.lora_dtype not in ("auto", model.dtype):
        yield "LoRA adapters are multiplied in the model's dtype on npu: leave out --lora-dtype."
    if model.is_hybrid or model.is_attention_free:
        yield from _states(vllm_config)
    if model.enable_sleep_mode:
        yield "Sleep mode is not there yet on npu: leave out --enable-sleep-mode."


def _code_for_gpus(model: ModelConfig) -> Iterator[str]:
    architecture = model.architecture
    written = model.registry.models.get(architecture)
    place = getattr(written, "module_name", "")
    if place.startswith(_GPU_MODELS) and not place.endswith(".deepseek_v32"):  # which has a part for other devices
        yield f"vLLM's code for {architecture} ({place}) runs on NVIDIA and AMD GPUs only: serve another model."
    if architecture == "OlmoHybridForCausalLM":
        yield f"vLLM's code for {architecture} calls Triton while it is made: serve another model."


def _states(vllm_config: VllmConfig) -> Iterator[str]:
    if not hasattr(torch.ops.npu_ops, "selective_scan"):
        yield "State-space and linear-attention models need the kernels of npu-ops: pip install npu-ops."
    if vllm_config.speculative_config is not None:
        yield "The states of state-space models cannot be rolled back on npu: leave out --speculative-config."
    if vllm_config.cache_config.use_replayssm:
        yield "ReplaySSM is not there on npu: leave out --use-replayssm."


def _experts(vllm_config: VllmConfig) -> Iterator[str]:
    if not hasattr(torch.ops.npu_ops, "fused_experts"):
        yield "Mixture-of-experts models need the kernels of npu-ops: pip install npu-ops, or serve a dense model."
    if vllm_config.lora_config is not None:
        yield "LoRA has no npu kernels for mixture-of-experts models yet: leave out --enable-lora."


def _parallel(vllm_config: VllmConfig) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        yield "Expert parallelism over data-parallel ranks is not there on npu: leave out --enable-expert-parallel."
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "Context parallelism is not there on npu: leave --decode- and --prefill-context-parallel-size at 1."
    if parallel.enable_dbo or parallel.use_ubatching:
        yield "Dual-batch overlap needs asynchronous streams: leave out --enable-dbo."
    if parallel.enable_elastic_ep:
        yield "Elastic expert parallelism is not there on npu: leave it off."


def _engine(vllm_config: VllmConfig) -> Iterator[str]:
    if vllm_config.use_v2_model_runner:
        yield "The V2 model runner launches Triton kernels without npu bodies: unset VLLM_USE_V2_MODEL_RUNNER."
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in _SPECULATION:
        yield f"Speculation by {speculation.method!r} has no npu kernels yet: use {', '.join(_SPECULATION)} or none."
    elif speculation is not None and importlib.util.find_spec("numba") is None:
        yield "Speculation by 'ngram' needs numba, which vLLM does not install without CUDA: pip install numba."
    offload = vllm_config.offload_config
    if offload is not None and getattr(offload.uva, "cpu_offload_gb", 0) > 0:
        yield "Weight offload needs unified addressing: leave out --cpu-offload-gb, or raise NPU_SIMULATOR_MEMORY."
    if vllm_config.compilation_config.mode:
        yield "Compilation is not there on npu, and nothing waits for it: leave out the mode in --compilation-config."


def _batch_invariance(vllm_config: VllmConfig) -> Iterator[str]:
    """Refuse sums whose order depends on the batch."""
    if not hasattr(torch.ops.npu_ops, "_set_batch_invariant"):
        yield "VLLM_BATCH_INVARIANT needs the kernels of npu-ops: pip install npu-ops, or unset it."
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.tensor_parallel_size > _SUM_OF_TWO and parallel.nnodes > 1:
        yield "Batch-invariant mode has no sums over more than two ranks on several hosts: unset VLLM_BATCH_INVARIANT."
    if model is None:
        return
    if model.runner_type == "pooling" and model.pooler_config and model.pooler_config.seq_pooling_type == "MEAN":
        yield (
            "vLLM takes means of differences of sums over the whole batch, which is not batch-invariant: "
            "choose another seq_pooling_type, or unset VLLM_BATCH_INVARIANT."
        )
    states = vllm_config.cache_config.mamba_ssm_cache_dtype
    if (model.is_hybrid or model.is_attention_free) and states not in ("auto", "float32"):
        yield (
            f"Batch-invariant mode keeps states in float32, not {states}, which would round them wherever a prompt is "
            "cut: leave out --mamba-ssm-cache-dtype, or unset VLLM_BATCH_INVARIANT."
        )
