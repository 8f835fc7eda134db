"""The sentences with which the npu device refuses settings of vLLM: what is not there, and the way out.

A setting that vLLM would leave out in silence is refused as well. Which field of vLLM's configuration is refused, works
or means nothing to a device is kept in tests/integration/settings.toml.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import vllm.envs as vllm_envs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from npu_platform import capabilities, compat, config, runners, triton_models

if TYPE_CHECKING:
    from vllm.config import (
        ECTransferConfig,
        KernelConfig,
        KVTransferConfig,
        ModelConfig,
        MultiModalConfig,
        SpeculativeConfig,
        VllmConfig,
    )

__all__ = ["end_of_rotations", "limits_of_the_device", "needs_gpu", "refusals"]

_GPU_MODELS = "vllm.models."  # where vLLM keeps models apart by the maker of the GPU
_GPU_WEIGHT_TRANSFER = ("nccl", "ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress")
_GPU_OFFLOADING = ("CPUOffloadingSpec", "TieringOffloadingSpec")
_GPU_CONNECTORS = ("SimpleCPUOffloadConnector", "HF3FSKVConnector", "MoRIIOConnector", "ExampleHiddenStatesConnector")
_GPU_ENCODER_CONNECTORS = ("ECCPUConnector", "ECMooncakeConnector")
_NIXL_CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "NPUNixlConnector")
_STATE_KERNELS = ("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend")
_SPECULATION = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "custom_class")
_DRAFTS_WITHOUT_CACHE = ("ngram", "suffix", "medusa", "custom_class")
_OWN_PROPOSERS = ("gemma4_mtp", "step3p5_mtp")  # heads that vLLM drafts with in ways of their own
_IMAGES = AttentionBackendEnum.TORCH_SDPA
_MTP_BESIDE_STAGES = "DeepSeekMTPModel"
_TOWERS_WITH_ADAPTERS = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
_WITHOUT_STAGES = "GraniteMoeHybridForCausalLM"  # whose state-space layers are asked for where another stage has them
_ALL_TO_ALL = "allgather_reducescatter"  # of any collectives; the others are libraries for GPUs
_SUM_OF_TWO = 2  # is the same in either order


def refusals(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield a sentence for each feature that is asked for and not there."""
    yield from _model(vllm_config)
    yield from _parallel(vllm_config)
    yield from _engine(vllm_config)
    yield from _transfers(vllm_config)
    if vllm_envs.VLLM_BATCH_INVARIANT:
        yield from _batch_invariance(vllm_config)


def needs_gpu(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield what vLLM itself would refuse later, but without the way out or with a wrong one."""
    transfer = vllm_config.kv_transfer_config
    connected = transfer is not None and transfer.has_connector("HiSparseConnector")
    if vllm_config.attention_config.hisparse_config is not None or connected:
        yield "HiSparse runs on NVIDIA GPUs only: leave out hisparse_config and the HiSparseConnector."


def limits_of_the_device(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield what is asked for and beyond what the vendor says of the device; the software NPU has all of it."""
    from vllm.config import CompilationMode, CUDAGraphMode

    device, model, compilation = capabilities.of_device(), vllm_config.model_config, vllm_config.compilation_config
    if model is not None and (sentence := device.no_dtype(model.dtype)) is not None:
        yield sentence
    if not device.graphs and compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE):
        yield "This device has no graphs: leave out cudagraph_mode in --compilation-config."
    if device.needs_compilation and compilation.mode not in (None, CompilationMode.VLLM_COMPILE):
        yield "This device runs compiled models only: leave out --enforce-eager, and mode in --compilation-config."


def end_of_rotations(model: ModelConfig) -> int | None:
    """Return how many positions vLLM turns by dynamic NTK scaling where the model's longest length is more, else None.

    vLLM multiplies the length by the factor, and computes a table of max_position_embeddings rows all the same.
    """
    rotations = getattr(model.hf_text_config, "rope_parameters", None) or {}
    end = getattr(model.hf_text_config, "max_position_embeddings", None)
    return end if rotations.get("rope_type") == "dynamic" and end is not None and model.max_model_len > end else None


def _model(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    if model is None:
        return
    yield from _code_for_gpus(model)
    if (end := end_of_rotations(model)) is not None:
        yield f"vLLM has rotations by dynamic NTK scaling for {end} positions only: pass --max-model-len {end}."
    if model.is_moe:
        yield from _experts(vllm_config)
    if model.quantization == "bitsandbytes":
        yield from _bitsandbytes(model)
    if vllm_config.lora_config is not None and vllm_config.lora_config.enable_tower_connector_lora:
        yield from _adapters_of_towers(model)
    if model.is_hybrid or model.is_attention_free:
        yield from _states(vllm_config, model)
    if model.enable_nccl_comm_suspend:
        yield "NCCL is a part of CUDA: leave out --enable-nccl-comm-suspend."
    if model.is_diffusion or vllm_config.diffusion_config is not None:
        yield "Diffusion language models have not been tried on npu: serve another model."
    if model.multimodal_config is not None:
        yield from _media(model.multimodal_config)


def _code_for_gpus(model: ModelConfig) -> Iterator[str]:
    architecture = model.architecture
    written = model.registry.models.get(architecture)
    place = getattr(written, "module_name", "")
    if architecture in triton_models.OF_TRITON:
        if (why := runners.without_kernels()) is not None:
            yield f"vLLM's code for {architecture} runs Triton kernels, and {why}, or serve another model."
    elif place.startswith(_GPU_MODELS) and not place.endswith(".deepseek_v32"):  # which has a part for other devices
        yield f"vLLM's code for {architecture} ({place}) runs on NVIDIA and AMD GPUs only: serve another model."


def _bitsandbytes(model: ModelConfig) -> Iterator[str]:
    """Refuse what vllm-bnb-plugin 0.0.3, whose method this is, would end with an error of torch while it loads."""
    said = getattr(model.hf_config, "quantization_config", None) or {}
    if model.dtype == torch.float32 and not said.get("load_in_8bit", False):
        yield (
            "vllm-bnb-plugin packs 4 bits as if a weight of float32 took twice the place of one of bfloat16: pass "
            "--dtype bfloat16, or leave out --quantization."
        )
    if model.is_moe:
        yield "The experts of vllm-bnb-plugin need Triton kernels of GPUs: leave out --quantization, or pass npu_int8."


def _adapters_of_towers(model: ModelConfig) -> Iterator[str]:
    """Refuse towers whose rows are not those that vLLM's runners list the adapters of, from the first image on."""
    if model.architecture not in _TOWERS_WITH_ADAPTERS:
        yield (
            f"Adapters of what sees are known to be right in {' and '.join(_TOWERS_WITH_ADAPTERS)} only: leave out "
            "--enable-tower-connector-lora."
        )
    media = model.multimodal_config
    if media is None:
        return
    if media.mm_encoder_tp_mode == "data":
        yield (
            "vLLM gives each rank the adapters of all images: leave out --mm-encoder-tp-mode, or "
            "--enable-tower-connector-lora."
        )
    if media.enable_mm_embeds or (media.get_limit_per_prompt("image") and media.get_limit_per_prompt("video")):
        yield (
            "Adapters of what sees count images alone, or videos alone: pass --limit-mm-per-prompt "
            "'{\"video\": 0}' and leave out --enable-mm-embeds, or leave out --enable-tower-connector-lora."
        )


def _media(media: MultiModalConfig) -> Iterator[str]:
    if media.mm_encoder_attn_dtype is not None:
        yield "Encoders of images attend in the model's dtype on npu: leave out --mm-encoder-attn-dtype."
    if media.mm_encoder_attn_backend not in (None, _IMAGES):
        yield f"Encoders of images attend by {_IMAGES.name} on npu: leave out --mm-encoder-attn-backend."


def _states(vllm_config: VllmConfig, model: ModelConfig) -> Iterator[str]:
    if not hasattr(torch.ops.npu_ops, "selective_scan"):
        yield f"State-space and linear-attention models need the kernels of npu-ops: {_way_to_ops()}."
    if vllm_config.speculative_config is not None and not model.is_hybrid:
        yield "vLLM rolls states back beside attention only: leave out --speculative-config, or serve a hybrid model."
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        dtype = getattr(vllm_config.cache_config, name)
        if dtype not in ("auto", "float32", str(model.dtype).removeprefix("torch.")):
            option = name.replace("_", "-")
            yield f"States are kept in the model's dtype or in float32 on npu, not in {dtype}: leave out --{option}."
    if vllm_config.cache_config.use_replayssm and (why := runners.without_kernels()) is not None:
        yield f"ReplaySSM runs vLLM's Triton kernels, and {why}, or leave out --use-replayssm."
    if vllm_config.mamba_config.backend.name != "TRITON":  # the default, which npu-ops' layers do not ask for
        yield "The states of state-space models are updated by npu-ops: leave out --mamba-backend."
    if vllm_config.mamba_config.enable_stochastic_rounding:
        yield "States are rounded to the nearest on npu: leave out --enable-mamba-cache-stochastic-rounding."
    chosen = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    for name in _STATE_KERNELS:
        if chosen.get(name) is not None:
            yield f"Linear attention is computed by npu-ops: leave out --{name.replace('_', '-')}."


def _experts(vllm_config: VllmConfig) -> Iterator[str]:
    if not hasattr(torch.ops.npu_ops, "fused_experts"):
        yield f"Mixture-of-experts models need the kernels of npu-ops: {_way_to_ops()}, or serve a dense model."
    if vllm_config.lora_config is not None and vllm_config.quant_config is not None:
        yield "Adapters have no npu kernels for quantised experts: leave out --enable-lora."
    shared_out = vllm_config.lora_config is not None and vllm_config.lora_config.fully_sharded_loras
    if shared_out and vllm_config.parallel_config.enable_expert_parallel:
        yield (
            "Each expert is on one rank, and so is its part of an adapter: leave out --fully-sharded-loras or "
            "--enable-expert-parallel."
        )
    if vllm_config.lora_config is not None and vllm_config.parallel_config.data_parallel_size > 1:
        yield "Adapters of experts stay on their data-parallel rank: leave out --enable-lora or --data-parallel-size."
    if vllm_config.parallel_config.use_sequence_parallel_moe and vllm_config.model_config.use_mla:
        # deepseek_v2.py tells a rank's part of the tokens by its length, which of a single token is 1 as well.
        yield (
            "vLLM 0.32 computes wrong tokens where latent attention and experts are on ranks of both kinds: leave out "
            "--enable-expert-parallel, or one of --tensor- and --data-parallel-size."
        )
    if vllm_config.kernel_config.moe_backend != "auto":
        yield "Experts are computed by npu-ops: leave out --moe-backend."
    if vllm_config.aux_output_config.enabled and not config.chose_v2_runner():
        yield (
            "Routed experts are recorded by the V2 model runner only: set VLLM_USE_V2_MODEL_RUNNER=1, or leave out "
            "--enable-return-routed-experts."
        )


def _parallel(vllm_config: VllmConfig) -> Iterator[str]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.pipeline_parallel_size > 1 and model is not None and model.architecture == _WITHOUT_STAGES:
        yield f"vLLM's loader of {_WITHOUT_STAGES} asks each stage for all layers: leave out --pipeline-parallel-size."
    if parallel.all2all_backend != _ALL_TO_ALL:
        yield (
            f"Ranks exchange the tokens of experts by {_ALL_TO_ALL} on npu, {parallel.all2all_backend} needs kernels "
            "of GPUs: leave out --all2all-backend."
        )
    yield from _context_parallel(vllm_config)
    if parallel.enable_dbo or parallel.use_ubatching:
        yield "Dual-batch overlap needs asynchronous streams: leave out --enable-dbo and --ubatch-size."
    if parallel.enable_fault_tolerance:
        yield "Fault tolerance needs all-to-all kernels of GPUs: leave out --enable-fault-tolerance."
    if parallel.data_parallel_backend == "ray":
        yield "Ray does not start replicas of npu engines: leave --data-parallel-backend at mp."


def _context_parallel(vllm_config: VllmConfig) -> Iterator[str]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.prefill_context_parallel_size > 1:
        yield "A rank computes whole prompts on npu: leave out --prefill-context-parallel-size."
    if parallel.decode_context_parallel_size == 1:
        return
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in _DRAFTS_WITHOUT_CACHE:
        yield (
            "The cache of what drafts is not shared out among context-parallel ranks: leave out --speculative-config, "
            "or use ngram."
        )
    if model is not None and (model.is_hybrid or model.is_attention_free):
        yield "States are not shared out among context-parallel ranks: leave out --decode-context-parallel-size."
    if model is not None and model.rswa_window is not None:
        yield (
            "Windows of answers (R-SWA) need all keys of a request on each rank: leave out "
            "--decode-context-parallel-size."
        )


def _kernels_that_failed() -> Iterator[str]:
    """Tell why npu-ops does not load: vLLM only logs that, and plain torch in its place is many times slower."""
    allowed = config.plugin_allow_list()
    if "npu_ops" in sys.modules or (allowed is not None and "npu_ops" not in allowed):
        return
    for plugin in importlib.metadata.entry_points(group="vllm.general_plugins", name="npu_ops"):
        try:
            plugin.load()
        except Exception as error:  # noqa: BLE001 - whatever it is, the user has to hear it
            yield f"npu-ops is installed and does not load: {error}"


def _engine(vllm_config: VllmConfig) -> Iterator[str]:
    yield from _kernels_that_failed()
    if config.chose_v2_runner():
        yield from _v2_runner(vllm_config)
    elif vllm_config.watermark_config is not None:
        yield (
            "Watermarks of text need the V2 model runner: "
            "set VLLM_USE_V2_MODEL_RUNNER=1, or leave out --watermark-config."
        )
    if vllm_config.speculative_config is not None:
        yield from _speculation(vllm_config.speculative_config)
        if vllm_config.cache_config.prefix_match_unit is not None and vllm_config.speculative_config.use_eagle():
            yield (
                "Prefixes end with whole blocks where a head drafts on npu: leave out --prefix-match-unit, or "
                "--speculative-config."
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            yield from _drafts_beside_stages(vllm_config, vllm_config.speculative_config)
    yield from _structured(vllm_config.structured_outputs_config.backend)
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        yield "Layers that share a KV cache compute whole prompts on npu: leave out --kv-sharing-fast-prefill."
    yield from _kernels(vllm_config.kernel_config)
    if vllm_config.profiler_config.profiler not in (None, "torch"):
        yield "On npu there is torch's profiler: set profiler to torch in --profiler-config."
    if vllm_config.observability_config.enable_layerwise_nvtx_tracing:
        yield "NVTX is a part of CUDA: leave out --enable-layerwise-nvtx-tracing."
    yield from _attention(vllm_config)
    yield from _compilation(vllm_config)


def _drafts_beside_stages(vllm_config: VllmConfig, speculation: SpeculativeConfig) -> Iterator[str]:
    draft, ways = speculation.draft_model_config, "leave out --speculative-config or --pipeline-parallel-size"
    mtp = speculation.method == "mtp" and draft is not None and draft.architecture == _MTP_BESIDE_STAGES
    if not mtp and speculation.method != "eagle3":
        # a model that drafts would be split as its target is, EAGLE's layers have names of the target's, other heads
        # ask for what comes from a stage before, and n-grams are looked for on the last stage alone
        by = draft.architecture if draft is not None and speculation.method == "mtp" else speculation.method
        yield f"Beside pipeline stages vLLM drafts by EAGLE-3 and {_MTP_BESIDE_STAGES}, not by {by}: {ways}."
    elif not config.chose_v2_runner():
        yield f"Drafts beside pipeline stages need the V2 model runner: set VLLM_USE_V2_MODEL_RUNNER=1, or {ways}."
    elif not vllm_config.scheduler_config.async_scheduling:
        yield f"Drafts beside pipeline stages are scheduled ahead: leave out --no-async-scheduling, or {ways}."


def _structured(backend: str) -> Iterator[str]:
    """Refuse what vLLM would find out at the first request, which then fails as every later one does."""
    if backend != "lm-format-enforcer":
        return
    try:
        importlib.import_module("lmformatenforcer.integrations.vllm")
    except ImportError as error:
        why = error.__context__ or error  # it blames vLLM, whose modules it asks for by names of the past
        yield (
            f"lm-format-enforcer does not go with this vLLM ({why}): pass xgrammar, guidance or outlines as the "
            "backend in --structured-outputs-config."
        )


def _kernels(kernels: KernelConfig) -> Iterator[str]:
    if kernels.linear_backend != "auto" or kernels.linear_backend_per_quant:
        yield "Linear layers are computed by npu-ops or torch: leave out --linear-backend and linear_backend_per_quant."
    if compat.wants_one_kernel_a_layer(kernels):
        yield "One kernel a layer runs on AMD GPUs only: leave out --monokernel."


def _v2_runner(vllm_config: VllmConfig) -> Iterator[str]:
    if (missing := runners.without_triton()) is not None:
        yield (
            f"The V2 model runner launches Triton kernels, and {missing}: mend that before vLLM is imported, or unset "
            "VLLM_USE_V2_MODEL_RUNNER."
        )
    if (counts := runners.counts_no_tokens()) is not None:
        yield f"{counts}: unset VLLM_USE_V2_MODEL_RUNNER."
    if lacking := runners.lacking_in_v2(vllm_config):
        yield f"vLLM's V2 model runner does not have {', '.join(lacking)}: unset VLLM_USE_V2_MODEL_RUNNER."


def _attention(vllm_config: VllmConfig) -> Iterator[str]:
    from npu_platform.attention.registration import backend_for

    attention, model, cache = vllm_config.attention_config, vllm_config.model_config, vllm_config.cache_config
    if model is not None and not model.is_attention_free:
        name, backend = backend_for(model.use_mla)
        if attention.backend is not None and attention.backend.name != name:
            yield (
                f"Attention backend {attention.backend.name} does not run on npu: leave out --attention-backend or "
                f"pass {name}."
            )
        elif not backend.supports_kv_cache_dtype(cache.cache_dtype):
            known = ", ".join(backend.supported_kv_cache_dtypes)
            yield (
                f"{name} has no KV cache of the kind {cache.cache_dtype}: leave out --kv-cache-dtype, or pass one of "
                f"{known}."
            )
    if attention.backend_per_kind or attention.mla_prefill_backend is not None:
        yield "npu has one attention backend a kind: leave out backend_per_kind and mla_prefill_backend."
    if attention.use_prefill_query_quantization:
        yield "Queries are not quantised on npu: leave out use_prefill_query_quantization in --attention-config."


def _compilation(vllm_config: VllmConfig) -> Iterator[str]:
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mm_encoder or compilation.compile_mm_encoder:
        yield (
            "Encoders of images are neither compiled nor captured on npu: leave out compile_mm_encoder and "
            "cudagraph_mm_encoder in --compilation-config."
        )


def _speculation(speculation: SpeculativeConfig) -> Iterator[str]:
    if speculation.method not in _SPECULATION:
        yield f"Speculation by {speculation.method!r} does not run on npu: use {', '.join(_SPECULATION)} or none."
    elif speculation.method == "ngram" and not config.chose_v2_runner() and importlib.util.find_spec("numba") is None:
        yield "Speculation by 'ngram' needs numba, which vLLM does not install without CUDA: pip install numba."
    head = speculation.draft_model_config.hf_config.model_type if speculation.method == "mtp" else None
    if head in _OWN_PROPOSERS:
        yield f"Heads of the kind {head} do not run on npu: leave out --speculative-config, or use ngram."
    if speculation.moe_backend is not None:
        yield "Experts are computed by npu-ops: leave out moe_backend in --speculative-config."
    if speculation.enable_adaptive_verification or speculation.dspark_draft_topk is not None:
        yield "Verification is not adaptive on npu: leave out enable_adaptive_verification and dspark_draft_topk."
    if speculation.rejection_sample_method == "fly" or compat.quantises_heads_of_drafters(speculation):
        yield "FLy and quantised heads of drafters are not there: leave out 'fly' and draft_lm_head_quantization."
    if config.chose_v2_runner():
        return
    if speculation.rejection_sample_method == "block":
        yield (
            "Blocks of drafts are verified by the V2 model runner only: set VLLM_USE_V2_MODEL_RUNNER=1, or leave out "
            "rejection_sample_method."
        )
    if speculation.num_speculative_tokens_per_batch_size is not None:
        yield (
            "The V1 model runner drafts as many tokens in any batch: set VLLM_USE_V2_MODEL_RUNNER=1, or leave out "
            "num_speculative_tokens_per_batch_size."
        )


def _encoder_caches(transfer: ECTransferConfig, ranks: int) -> Iterator[str]:
    if transfer.ec_connector in _GPU_ENCODER_CONNECTORS:
        yield (
            f"{transfer.ec_connector} copies from GPUs only: name ECExampleConnector, or a connector of your own by "
            "ec_connector_module_path, in --ec-transfer-config."
        )
    if transfer.ec_connector == "ECExampleConnector" and transfer.is_ec_consumer and ranks > 1:
        yield (
            "ECExampleConnector puts what it reads on the first device: leave out --tensor-parallel-size and "
            "--pipeline-parallel-size, or --ec-transfer-config."
        )


def _transfers(vllm_config: VllmConfig) -> Iterator[str]:
    yield from _weight_offload(vllm_config)
    model = vllm_config.model_config
    if vllm_config.ec_transfer_config is not None:
        yield from _encoder_caches(vllm_config.ec_transfer_config, vllm_config.parallel_config.world_size)
    weights = vllm_config.weight_transfer_config
    if weights is not None and weights.backend in _GPU_WEIGHT_TRANSFER:
        yield (
            f"Weights are transferred by {weights.backend!r} between GPUs only: name npuccl as the backend in "
            "--weight-transfer-config, or an engine of your own that a plugin registers."
        )
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    asked = cache.kv_offloading_size is not None and cache.kv_offloading_backend == "native"
    if asked or (transfer is not None and _offloads_from_gpu(transfer)):
        yield (
            "vLLM's own offloading of the KV cache copies from GPUs only: instead of --kv-offloading-size or the "
            'OffloadingConnector, install npu-kvconnector and pass --kv-transfer-config \'{"kv_connector": '
            '"NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "8GiB"}}\'.'
        )
    if transfer is not None and model is not None and model.rswa_window is not None:
        yield (
            "Of an answer that sees a window of itself (R-SWA) the blocks before that are given back, and not there to "
            "be kept elsewhere: leave out --kv-transfer-config."
        )
    if transfer is not None and transfer.kv_buffer_device == "npu" and config.checks_memory():
        for name in _NIXL_CONNECTORS:
            if transfer.has_connector(name):
                yield (
                    "With NPU_DEBUG=memory none but kernels may read the device's memory, and NIXL would: "
                    'add "kv_buffer_device": "cpu" to --kv-transfer-config.'
                )
    for name in _GPU_CONNECTORS:
        if transfer is not None and transfer.has_connector(name):
            yield f"{name} copies from GPUs only: leave it out of --kv-transfer-config."


def _weight_offload(vllm_config: VllmConfig) -> Iterator[str]:
    from vllm.config import CompilationMode

    offload, model = vllm_config.offload_config, vllm_config.model_config
    in_place, ahead = offload.uva.cpu_offload_gb > 0, offload.prefetch.offload_group_size > 0
    if in_place and not capabilities.of_device().reads_host_memory:
        yield (
            "This device does not read the host's memory: instead of --cpu-offload-gb pass --offload-group-size, which "
            "copies layers ahead."
        )
    if (in_place or ahead) and model is not None and model.enable_sleep_mode:
        yield (
            "Weights that are offloaded do not sleep: leave out --enable-sleep-mode, or --offload-group-size and "
            "--cpu-offload-gb."
        )
    if (in_place or ahead) and model is not None and _quantises_while_loading(model):
        yield (
            "Weights that are quantised while they are loaded are not there to be offloaded: leave out --quantization, "
            "or --offload-group-size and --cpu-offload-gb."
        )
    if not ahead:
        return
    if vllm_config.compilation_config.mode == CompilationMode.VLLM_COMPILE:
        yield (
            "Weights are not offloaded from compiled layers on npu: leave out --offload-group-size, or compilation "
            "with mode VLLM_COMPILE."
        )


def _quantises_while_loading(model: ModelConfig) -> bool:
    """Say whether a quantisation is asked for that the checkpoint does not have."""
    has = any(getattr(model.hf_config, name, None) for name in ("quantization_config", "compression_config"))
    return model.quantization is not None and not has


def _offloads_from_gpu(transfer: KVTransferConfig) -> bool:
    """Say whether this is vLLM's offloading with a worker of vLLM's own; a plugin's worker may know npu."""
    one = {"kv_connector": transfer.kv_connector, "kv_connector_extra_config": transfer.kv_connector_extra_config}
    for connector in (one, *transfer.kv_connector_extra_config.get("connectors", [])):
        spec = connector.get("kv_connector_extra_config", {}).get("spec_name", _GPU_OFFLOADING[0])
        if connector.get("kv_connector") == "OffloadingConnector" and spec in _GPU_OFFLOADING:
            return True
    return False


def _batch_invariance(vllm_config: VllmConfig) -> Iterator[str]:
    """Refuse sums whose order depends on the batch."""
    if not hasattr(torch.ops.npu_ops, "_set_batch_invariant"):
        yield f"VLLM_BATCH_INVARIANT needs the kernels of npu-ops: {_way_to_ops()}, or unset it."
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


def _way_to_ops() -> str:
    """Return what brings npu-ops' kernels here: to install it, or to let vLLM load it."""
    try:
        importlib.metadata.version("npu-ops")
    except importlib.metadata.PackageNotFoundError:
        return "pip install npu-ops"
    allowed = config.plugin_allow_list()
    if allowed is not None and "npu_ops" not in allowed:
        return f"it is installed but not loaded, since VLLM_PLUGINS leaves it out: add npu_ops to {','.join(allowed)}"
    return "it is installed, but its plugin npu_ops failed to load: npu doctor says why"
