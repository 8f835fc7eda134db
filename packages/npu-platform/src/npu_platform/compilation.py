"""Owns what vLLM's compilation of a model by Inductor does differently on npu."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ["NPUPassManager"]


class NPUPassManager(PostGradPassManager):
    """vLLM's passes over a graph, but the last: Inductor itself finds where an op may write in place."""

    def configure(self, config: VllmConfig) -> None:
        """Choose the passes as vLLM does, then leave out the one that looks for ops of its CUDA library."""
        super().configure(config)
        self.fix_functionalization = _AsItIs(config)


class _AsItIs(VllmInductorPass):
    """Leaves a graph as it is."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Do nothing."""
