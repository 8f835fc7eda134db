"""Who drafts for the V2 runner: vLLM's speculators, with graphs of npu."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from npu_platform import compat
from npu_platform.v2.graphs import NPUDraftGraphManager

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.states import RequestState

__all__ = ["make_speculator"]


class _OnNpu(TargetDependentARSpeculator):
    """Makes graph managers of npu. It comes first among the bases."""

    init_cudagraph_manager = compat.reading(
        TargetDependentARSpeculator.init_cudagraph_manager, SpeculatorCudaGraphManager=NPUDraftGraphManager
    )


class _NPUEagle(_OnNpu, EagleSpeculator):
    pass


class _NPUMTP(_OnNpu, MTPSpeculator):
    pass


def make_speculator(vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> Any:
    """Return who drafts as the configuration says; n-grams and draft models are vLLM's own, which make no graphs."""
    speculation = vllm_config.speculative_config
    assert speculation is not None
    if speculation.method == "mtp":
        return _NPUMTP(vllm_config, device)
    if speculation.use_eagle():
        return _NPUEagle(vllm_config, device)
    return init_speculator(vllm_config, device, req_states)
