"""Weights that stay in pinned host memory: read there, or copied before their layer runs; vLLM's ways, on npu.

With ``--cpu-offload-gb`` kernels read them where they are. The copies of ``--offload-group-size`` go into buffers that
layers share, on a stream of their own; graphs record them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.offloader.base import BaseOffloader, NoopOffloader
from vllm.model_executor.offloader.prefetch import PrefetchOffloader, _ModuleOffloader
from vllm.model_executor.offloader.uva import UVAOffloader

from npu_platform import compat

if TYPE_CHECKING:
    from vllm.config import OffloadConfig

__all__ = ["NPUPrefetchOffloader", "create_offloader"]


def create_offloader(config: OffloadConfig) -> BaseOffloader:
    """Return what the configuration asks for, of what npu does not refuse."""
    prefetch, uva = config.prefetch, config.uva
    ahead = config.offload_backend != "uva" and prefetch.offload_group_size > 0
    if not ahead and (config.offload_backend == "prefetch" or uva.cpu_offload_gb == 0):
        return NoopOffloader()
    if not ahead:
        return UVAOffloader(int(uva.cpu_offload_gb * 2**30), uva.cpu_offload_params)
    return NPUPrefetchOffloader(
        prefetch.offload_group_size,
        prefetch.offload_num_in_group,
        prefetch.offload_prefetch_step,
        prefetch.offload_params,
    )


class _NPUModuleOffloader(_ModuleOffloader):
    __init__ = compat.with_npu_streams(_ModuleOffloader.__init__)
    start_onload_to_static = compat.with_npu_streams(_ModuleOffloader.start_onload_to_static)


class NPUPrefetchOffloader(PrefetchOffloader):
    """vLLM's offloader that copies ahead, with the methods that use streams and events on those of npu."""

    __init__ = compat.with_npu_streams(PrefetchOffloader.__init__)
    wrap_modules = compat.with_npu_streams(PrefetchOffloader.wrap_modules, _ModuleOffloader=_NPUModuleOffloader)
    _wait_for_layer = compat.with_npu_streams(PrefetchOffloader._wait_for_layer)
    sync_prev_onload = compat.with_npu_streams(PrefetchOffloader.sync_prev_onload)
    join_after_forward = compat.with_npu_streams(PrefetchOffloader.join_after_forward)
