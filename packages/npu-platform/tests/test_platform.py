"""Every row of vLLM's Platform interface is either overridden here or right by default; a new row must be decided."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from vllm.platforms.interface import Platform, PlatformEnum

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.platform import NPUPlatform

# As a command of vLLM that prints JSON, and then one that makes an engine.
COMMANDS = """
from vllm.config import LoggingConfig
from vllm.logger import configure_logging
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
configure_logging(LoggingConfig())
current_platform.pre_register_and_update(FlexibleArgumentParser())
print("{}")
current_platform.pre_register_and_update()
"""

# Default value -> why it is right for npu.
RIGHT_BY_DEFAULT = {
    "can_update_inplace": "tensors may be written in place",
    "check_max_model_len": "no limit of the device",
    "device_control_id_to_physical_device_id": "reads NPU_VISIBLE_DEVICES through device_control_env_var",
    "device_id_to_physical_device_id": "the same",
    "logical_device_id_to_visible_device_id": "the same",
    "visible_device_id_to_physical_device_id": "the same",
    "enable_multi_stream_overlap": "streams are synchronous",
    "get_all_gpu_pci_bus_ids": "no PCI bus",
    "get_compile_backend": "simple_compile_backend",
    "get_cpu_architecture": "the host's",
    "import_ir_kernels": "vLLM's own providers; npu-ops adds its one as a general plugin",
    "get_device_capability": "None: checks for CUDA capabilities are skipped",
    "has_device_capability": "follows get_device_capability",
    "is_device_capability": "the same",
    "is_device_capability_family": "the same",
    "get_global_graph_pool": "calls torch.npu.graph_pool_handle",
    "get_infinity_values": "float infinities",
    "get_max_output_tokens": "no limit of the device",
    "get_supported_vit_attn_backends": "torch SDPA",
    "get_vit_attn_backend": "torch SDPA",
    "inference_mode": "torch's",
    "is_arch_support_pdl": "a CUDA feature",
    "is_cuda": "by _enum",
    "is_rocm": "by _enum",
    "is_tpu": "by _enum",
    "is_xpu": "by _enum",
    "is_cpu": "by _enum",
    "is_zen_cpu": "by _enum",
    "is_out_of_tree": "by _enum",
    "is_unspecified": "by _enum",
    "is_cuda_alike": "by _enum",
    "is_integrated_gpu": "the device has memory of its own",
    "make_synced_weight_loader": "loads are synchronous",
    "use_sync_weight_loader": "the same",
    "pass_key": "for Inductor, refused",
    "register_custom_kv_cache_specs": "no specs of our own",
    "set_additional_forward_context": "no per-step data of our own",
    "stateless_init_device_torch_dist_pg": "elastic expert parallelism is refused",
    "support_deep_gemm": "a CUDA library",
    "fp8_dtype": "e4m3, as everywhere but on one vendor's chips",
    "is_fp8_fnuz": "the same",
    "supports_fp8": "False: kernels are asked for by vLLM's registry",
    "supports_mx": "the same",
    "update_block_size_for_backend": "any block size will do",
    "use_all_gather": "logits on all ranks",
    "use_custom_allreduce": "a CUDA feature",
    "use_custom_op_collectives": "no compilation",
    "uses_host_device_handling": "a TPU feature",
    "validate_environ": "warns about unknown VLLM_ variables",
    "verify_model_arch": "architectures are refused with the configuration, by the code that vLLM has for them",
}

# The same of vLLM 0.33, which 0.32 does not have.
RIGHT_BY_DEFAULT_0_33 = {"get_kv_cache_config_builder_cls": "caches are grouped as vLLM does it"}


def public_methods(cls: type) -> set[str]:
    return {
        name
        for name, value in inspect.getmembers_static(cls)
        if not name.startswith("_")
        and (isinstance(value, (classmethod, staticmethod, property)) or inspect.isfunction(value))
    }


def test_every_method_of_the_interface_is_decided() -> None:
    overridden = set(vars(NPUPlatform))
    undecided = public_methods(Platform) - overridden - {*RIGHT_BY_DEFAULT, *RIGHT_BY_DEFAULT_0_33}
    assert not undecided, f"vLLM's Platform has methods that nobody decided: {sorted(undecided)}"


def test_the_table_of_defaults_is_current() -> None:
    assert set(RIGHT_BY_DEFAULT) & set(vars(NPUPlatform)) == set(), "overridden, so not the default"
    assert set(RIGHT_BY_DEFAULT) - public_methods(Platform) == set(), "vLLM's Platform does not have them"


def test_every_attribute_that_the_device_must_set_is_set() -> None:
    assert NPUPlatform._enum is PlatformEnum.OOT
    assert (NPUPlatform.device_name, NPUPlatform.device_type, NPUPlatform.dispatch_key) == ("npu", "npu", "PrivateUse1")
    assert NPUPlatform.dist_backend in torch.distributed.Backend.backend_list
    assert NPUPlatform.device_control_env_var == "NPU_VISIBLE_DEVICES"
    assert NPUPlatform.simple_compile_backend == "eager"


@pytest.mark.parametrize(
    "name", ["opaque_attention_op", "support_hybrid_kv_cache", "support_static_graph_mode", "is_pin_memory_available"]
)  # attention: without a configuration
def test_what_vllm_would_get_silently_wrong_is_true(name: str) -> None:
    assert getattr(NPUPlatform, name)() is True


def test_attention_is_an_op_only_where_something_is_compiled() -> None:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

    for mode in (CompilationMode.NONE, CompilationMode.STOCK_TORCH_COMPILE, CompilationMode.VLLM_COMPILE):
        with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=mode))):
            assert NPUPlatform.opaque_attention_op() is (mode != CompilationMode.NONE)


def test_class_names_resolve() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for path in (
        NPUPlatform.get_static_graph_wrapper_cls(),
        NPUPlatform.get_punica_wrapper(),
        NPUPlatform.get_device_communicator_cls(),
    ):
        assert isinstance(resolve_obj_by_qualname(path), type)


def test_device_rows_agree_with_torch_npu() -> None:
    assert NPUPlatform.get_device_total_memory() == torch.npu.mem_get_info()[1]
    assert NPUPlatform.get_device_name() == torch.npu.get_device_name()
    assert NPUPlatform.num_compute_units() >= 1
    before = NPUPlatform.get_current_memory_usage()
    held = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    assert NPUPlatform.get_current_memory_usage() - before == held.nbytes


def test_the_platform_says_that_it_is_there_with_an_engine_and_not_before_a_commands_json() -> None:
    done = subprocess.run([sys.executable, "-c", COMMANDS], capture_output=True, text=True, check=True)
    json, _, log = done.stdout.partition("\n")
    assert json == "{}"
    assert "the npu platform activates: " in log


def test_platform_attributes_fall_through_to_torch_npu() -> None:
    platform = NPUPlatform()
    assert platform.current_stream is torch.npu.current_stream
    assert platform.Event is torch.npu.Event


def test_dtypes_without_kernels_are_refused() -> None:
    NPUPlatform.check_if_supports_dtype(torch.bfloat16)
    with pytest.raises(UnsupportedFeatureError, match="float64.*--dtype bfloat16"):
        NPUPlatform.check_if_supports_dtype(torch.float64)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("is_sleep_mode_available", "--enable-sleep-mode"), ("is_cumem_allocator_available", "--enable-cumem-allocator")],
)
def test_what_vllm_asks_only_to_refuse_names_the_way_out(
    name: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NPUPlatform().is_sleep_mode_available()
    monkeypatch.setattr(torch.npu, "can_suspend_pools", lambda: False)  # as a driver says that cannot
    with pytest.raises(UnsupportedFeatureError, match=f"leave out {way_out}"):
        getattr(NPUPlatform(), name)()


@pytest.mark.parametrize(
    ("asked", "given"), [("auto", "npu_platform.worker.NPUWorker"), ("their.Worker", "their.Worker")]
)
def test_the_worker_is_ours_unless_another_is_named(asked: str, given: str) -> None:
    from vllm.config import DeviceConfig, ParallelConfig, VllmConfig

    config = VllmConfig(parallel_config=ParallelConfig(worker_cls=asked), device_config=DeviceConfig("npu"))
    assert config.parallel_config.worker_cls == given


def test_quantisation_needs_a_registered_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels import linear

    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.OOT, [])
    with pytest.raises(UnsupportedFeatureError, match="no kernels for auto_awq checkpoints: install npu-ops"):
        NPUPlatform.verify_quantization("auto_awq")
    linear.register_linear_kernel(linear.CPUWNA16LinearKernel, PlatformEnum.OOT)
    NPUPlatform.verify_quantization("auto_awq")
    with pytest.raises(UnsupportedFeatureError, match="no kernels for torchao checkpoints: quantise with one of"):
        NPUPlatform.verify_quantization("torchao")
    NPUPlatform.verify_quantization("of_a_plugin")


def test_devices_of_two_hosts_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [NPUPlatform.get_device_uuid(number) for number in (0, 1, 0)]
    assert names[0] == names[2] != names[1]
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert NPUPlatform.get_device_uuid(0) not in names
