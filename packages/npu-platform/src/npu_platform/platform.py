"""NPUPlatform: vLLM's platform hooks, each one line or one call into a room below.

Only torch and the parts of vLLM that may be imported while the platform is being resolved are imported at module
level (vllm.config imports ``current_platform``, so importing it here would be a cycle).
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from npu_platform import activation, capabilities, compat, config, features, forks, layer_names, numa, triton_models
from npu_platform.distributed import choose_executor
from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton import availability

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.inputs import EngineInput
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.npu_platform")


class NPUPlatform(Platform):
    """The out-of-tree platform ``npu``; upstream interface: ``vllm.platforms.interface.Platform``."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    dist_backend = "npuccl"
    device_control_env_var = "NPU_VISIBLE_DEVICES"
    ray_device_key = "NPU"
    # for Ray, a resource of that name is Ascend's: it would set the variable of Ascend's driver
    ray_noset_device_env_vars: ClassVar[list[str]] = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]
    simple_compile_backend = "eager"

    def __init__(self) -> None:
        """Register the attention backends' names: an ``AttentionConfig`` that names one may come before an engine.

        vLLM makes this object when it is imported, before the first of its modules with Triton kernels.
        """
        from npu_platform.attention.registration import register_attention_backend

        if availability.for_vllm():
            compat.begin_quick_sources()  # until the first configuration is complete
        register_attention_backend()

    # --- the device -------------------------------------------------------------------------------------------

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make `device` the current one of this thread."""
        torch.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.npu.manual_seed_all(seed)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return the marketing name of the device."""
        return torch.npu.get_device_name(device_id)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """Return a name of the device that no other host of a cluster has, until this one boots again."""
        return f"npu-{socket.gethostname()}-{numa.where()[0]}-{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the bytes of the device's memory."""
        return torch.npu.mem_get_info(device_id)[1]

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Return the bytes allocated on `device` now; vLLM subtracts two readings to get the model's size."""
        torch.npu.reset_peak_memory_stats(device)
        return torch.npu.max_memory_allocated(device)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Return the number of threads that the device's kernels run on."""
        return torch.npu.get_device_properties(device_id).multi_processor_count

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """What models may be computed in; the first takes the place of a checkpoint's dtype that is not there."""
        return list(capabilities.of_device().dtypes)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Raise UnsupportedFeatureError unless the device computes in `dtype`."""
        if (sentence := capabilities.of_device().no_dtype(dtype)) is not None:
            raise UnsupportedFeatureError(sentence)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Say that the device has a pinned host allocator."""
        return True

    def is_sleep_mode_available(self) -> bool:
        """Say True; raise UnsupportedFeatureError for a driver without it: vLLM would refuse it without a way out."""
        if torch.npu.can_suspend_pools():
            return True
        msg = "The driver of this npu cannot take memory back and keep its addresses: leave out --enable-sleep-mode."
        raise UnsupportedFeatureError(msg)

    def is_cumem_allocator_available(self) -> bool:
        """Raise UnsupportedFeatureError: vLLM asks where its CUDA allocator is on."""
        msg = "The cumem allocator is a part of CUDA: leave out --enable-cumem-allocator."
        raise UnsupportedFeatureError(msg)

    # --- plugin life cycle ------------------------------------------------------------------------------------

    @classmethod
    def log_warnings(cls) -> None:
        """Say what ``VLLM_PLUGINS`` leaves out, and no more: vLLM calls this before commands that print JSON, too."""
        missing = activation.missing_plugins()
        if missing:
            logger.warning(
                "VLLM_PLUGINS leaves out %s; to load the whole family set VLLM_PLUGINS=%s",
                ", ".join(missing),
                ",".join(activation.installed_plugins()),
            )

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        """Begin the choice of the model runner, and remember what the user gave of how steps are scheduled.

        With an engine, and so without `parser`, which every command of vLLM makes, say that the platform is active.
        """
        from npu_platform import runners
        from npu_platform.scheduling import remember_what_the_user_gave

        if parser is None:
            logger.info_once("%s", activation.decide().reason)
        runners.begin_choice()
        if availability.for_vllm():
            triton_models.register_models()
        remember_what_the_user_gave()

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: the kernels come with the device library and with npu-ops, not with vLLM."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Give every Triton kernel that the V1 runner launches a body in torch ops; V2's run as they are."""
        from npu_platform.sampling.triton_bodies import TRITON_BODIES
        from npu_platform.state_copies import bodies_of_copies

        if availability.for_vllm():
            compat.begin_quick_sources()  # until the worker is up
        v2 = config.chose_v2_runner()
        compat.register_kernels(bodies_of_copies(of_drafts=not v2) | ({} if v2 else TRITON_BODIES))

    # --- configuration ----------------------------------------------------------------------------------------

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Choose runner, scheduling, no compilation and decode graphs, where the user chose nothing; what states need.

        This hook runs before vLLM derives ``custom_ops`` from the mode; later would be too late. Raises
        UnsupportedFeatureError for what only GPUs have.
        """
        from vllm.plugins import load_general_plugins

        from npu_platform import runners
        from npu_platform.graphs.defaults import apply_graph_defaults
        from npu_platform.scheduling import choose_for_the_host

        # EngineArgs loads npu-ops and the like; a VllmConfig that somebody builds by hand does not.
        load_general_plugins()
        runners.choose(vllm_config)
        features.refuse_early(vllm_config)
        features.drop_attention_of_gpus(vllm_config)
        choose_for_the_host(vllm_config)
        apply_graph_defaults(vllm_config)
        features.end_with_rotations(vllm_config)
        features.disable_prefix_caching_of_states(vllm_config)
        features.keep_states_in_float32(vllm_config)

    @classmethod
    def validate_request(cls, processed_inputs: EngineInput, params: SamplingParams | PoolingParams) -> None:
        """Refuse what would end the engine's process; raises UnsupportedFeatureError, answered with 400."""
        from vllm.sampling_params import SamplingParams

        if isinstance(params, SamplingParams) and config.chose_v2_runner():
            from npu_platform.v2 import limits

            limits.refuse(params)

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> IrOpPriorityConfig:
        """Prefer npu-ops' provider of vLLM's IR ops where it has registered one."""
        from vllm import ir
        from vllm.config.kernel import IrOpPriorityConfig

        native = ["native"]
        provided = {name: ["npu_ops", *native] for name in ir.ops.__all__ if "npu_ops" in getattr(ir.ops, name).impls}
        return IrOpPriorityConfig.with_default(native, **provided)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Name the worker and the memory nodes of ranks, and refuse what the device cannot do; for every configuration.

        Raises ConfigurationError or UnsupportedFeatureError.
        """
        config.NPUConfig.from_additional_config(vllm_config.additional_config)
        features.refuse_unsupported(vllm_config)
        features.disable_fusion_passes(vllm_config)
        features.keep_images_whole(vllm_config)
        features.choose_sleep_mode(vllm_config)
        features.choose_loader(vllm_config)
        layer_names.find_listed_layers(vllm_config)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "npu_platform.worker.NPUWorker"
        choose_executor(vllm_config)
        numa.bind_ranks(vllm_config.parallel_config)
        numa.share_among_replicas(vllm_config)
        config.prepare_child_environment()
        forks.prepare(bound=vllm_config.parallel_config.numa_bind)
        compat.end_quick_sources()

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Raise UnsupportedFeatureError where no kernel is registered for the method's layers."""
        from npu_platform.quantization import refuse_without_kernels

        refuse_without_kernels(quant)

    # --- attention --------------------------------------------------------------------------------------------

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, num_heads: int | None = None
    ) -> str:
        """Return the paged attention backend; raise UnsupportedFeatureError naming what it cannot do."""
        from npu_platform.attention.registration import select_backend

        return select_backend(selected_backend, attn_selector_config)

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: MLAPrefillSelectorConfig) -> type[MLAPrefillBackend]:
        """Return the one way that prompts of latent attention are computed."""
        from npu_platform.attention.mla import NPUMLAPrefill

        return NPUMLAPrefill

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Say whether a layer's attention is one op: to a compiler, or it would keep the profile run's metadata.

        Without one an op of vLLM is Python behind PyTorch's dispatcher, twice a layer, for nothing.
        """
        from vllm.config import CompilationMode, get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
        return vllm_config is None or vllm_config.compilation_config.mode != CompilationMode.NONE

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Say True: sliding-window and full layers keep caches of their own."""
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Allow several attention layers to share one entry of the runner's KV caches."""

    # --- KV transfer ------------------------------------------------------------------------------------------

    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]:
        """Let NIXL read blocks from the device's memory, which the host shares, or from copies of them (``cpu``)."""
        return {"npu": ("npu", "cpu")}

    @classmethod
    def get_nixl_memory_type(cls) -> str:
        """Return NIXL's name for memory of the host, which the device's is as well."""
        return "DRAM"

    @classmethod
    def copy_blocks(
        cls,
        src_cache: torch.Tensor,
        dst_cache: torch.Tensor,
        src_block_indices: torch.Tensor,
        dst_block_indices: torch.Tensor,
    ) -> None:
        """Copy blocks (dimension 0 of both caches) between device and host, either way; indices lie beside their cache.

        vLLM knows it by two names, one a direction.
        """
        dst_cache.index_copy_(0, dst_block_indices, src_cache.index_select(0, src_block_indices).to(dst_cache.device))

    insert_blocks_to_device = swap_out_blocks_to_host = copy_blocks

    # --- graphs, LoRA, distributed ----------------------------------------------------------------------------

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Say whether decode steps are replayed as device graphs."""
        return capabilities.of_device().graphs

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """Return the wrapper that captures and replays one callable."""
        return "npu_platform.graphs.wrapper.NPUGraphWrapper"

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        """Return vLLM's passes for Inductor, without the one that needs vLLM's own CUDA ops."""
        return "npu_platform.compilation.NPUPassManager"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """Return the LoRA wrapper, whose products read the adapters' indices from the device."""
        return "npu_platform.lora.NPUPunicaWrapper"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the communicator of tensor, pipeline and data parallel groups."""
        return capabilities.of_device().communicator
