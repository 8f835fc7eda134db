"""Which models run vLLM's own Triton kernels on npu, and where vLLM finds their code."""

from __future__ import annotations

__all__ = ["OF_TRITON", "register_layers", "register_models"]

OF_TRITON = {
    # of the two makers' codes the one without CUDA's own kernels
    "KimiLinearForCausalLM": "vllm.models.kimi_k3.amd.linear:KimiLinearForCausalLM",
    "OlmoHybridForCausalLM": "vllm.model_executor.models.olmo_hybrid:OlmoHybridForCausalLM",
    "BailingMoeV2_5ForCausalLM": "vllm.model_executor.models.bailing_moe_linear:BailingMoeV25ForCausalLM",
}
"""Architecture -> where its code is."""


def register_models() -> None:
    """Tell vLLM's registry of models, before a configuration is made."""
    from vllm import ModelRegistry

    for architecture, place in OF_TRITON.items():
        ModelRegistry.register_model(architecture, place)


def register_layers() -> None:
    """Put npu's variants in the place of layers that ask for a GPU, before a model is built."""
    from npu_platform import triton_layers  # noqa: F401 - registers them
