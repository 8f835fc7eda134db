"""The V2 runner's graphs: vLLM's managers, which capture and replay ``torch.npu.NPUGraph``."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from npu_platform import compat
from npu_platform.graphs.capturing import progress_bar

__all__ = ["NPUDraftGraphManager", "NPUModelGraphManager"]


class _OnNpu(CudaGraphManager):
    """Captures on npu. It comes after a manager of vLLM's among the bases, where that one's ``super()`` finds it."""

    capture = torch.inference_mode()(
        compat.with_npu_streams(CudaGraphManager.capture, graph_capture=compat.no_graph_capture, tqdm=progress_bar)
    )


class NPUModelGraphManager(ModelCudaGraphManager, _OnNpu):
    """The graphs of the model."""


class NPUDraftGraphManager(SpeculatorCudaGraphManager, _OnNpu):
    """The graphs of a model that drafts."""
