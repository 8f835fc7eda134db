"""The graph settings that apply when the user set none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_platform import capabilities

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig

_CAPTURE_SIZES = (1, 2, 4, *range(8, 129, 8))
"""Tokens of the batches to capture. A graph saves a step what Python takes to launch it, whatever the batch; a row of
padding costs as much as another, next to nothing while reading the weights takes the time, and on two cores from some
sixteen rows on an eighth to a sixth of what the graph saves. Each size costs some hundredths of a second at start."""


def apply_graph_defaults(vllm_config: VllmConfig) -> None:
    """Choose no compilation, decode graphs and few sizes, where the user chose nothing; runs in ``VllmConfig``.

    Graphs of pieces bring compilation with them, which cuts the model into them.

    With speculation, graphs are of any batch with so many tokens: drafts are found for some requests and in some steps
    only, and vLLM's graphs of decode alone are for batches in which each request has all of its drafts.
    """
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    if compilation.mode is None:
        in_pieces = compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_piecewise_cudagraphs()
        compiled = in_pieces or capabilities.of_device().needs_compilation
        compilation.mode = CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = _graph_mode(vllm_config)
    if compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        largest = vllm_config.scheduler_config.max_num_seqs * vllm_config.uniform_decode_query_len
        sizes = [size for size in _CAPTURE_SIZES if size < largest]
        compilation.cudagraph_capture_sizes = [*sizes, min(largest, _CAPTURE_SIZES[-1])]


def _graph_mode(vllm_config: VllmConfig) -> CUDAGraphMode:
    from vllm.config import CUDAGraphMode

    if not capabilities.of_device().graphs:
        return CUDAGraphMode.NONE
    mixed = vllm_config.speculative_config is not None and _attends_natively(vllm_config)
    return CUDAGraphMode.FULL if mixed else CUDAGraphMode.FULL_DECODE_ONLY


def _attends_natively(vllm_config: VllmConfig) -> bool:
    """Say whether attention reads all that changes by step on the device, as a graph of any batch must."""
    from npu_platform.attention import kernels

    model = vllm_config.model_config
    return model is not None and kernels.native_attention(model.get_head_size())
