"""The graph settings that apply when the user set none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_platform import capabilities

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig

_CAPTURE_SIZES = (1, 2, 4, *range(8, 129, 8))
"""Tokens of the batches to capture. A graph saves a step what Python takes to launch it, whatever the batch. Where a
replay does not leave out padding (``graphs.padding``), a row of it costs as much as another, next to nothing while
reading the weights takes the time, and on two cores from some sixteen rows on an eighth to a sixth of what the graph
saves. Each size costs some hundredths of a second at start."""


def apply_graph_defaults(vllm_config: VllmConfig) -> None:
    """Choose no compilation, graphs and few sizes, where the user chose nothing; runs in ``VllmConfig``.

    Graphs of pieces bring compilation with them, which cuts the model into them.

    Graphs are of any batch with so many tokens, short prompts among them, where a replay leaves out what a batch lacks
    to a graph's size. With speculation they are anyway: drafts are found for some requests and in some steps only, and
    vLLM's graphs of decode alone are for batches in which each request has all of its drafts.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    if compilation.mode is None:
        in_pieces = compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_piecewise_cudagraphs()
        compiled = in_pieces or capabilities.of_device().needs_compilation
        compilation.mode = CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = _graph_mode(vllm_config)
    if compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        scheduler = vllm_config.scheduler_config
        largest = scheduler.max_num_seqs * vllm_config.uniform_decode_query_len
        if compilation.cudagraph_mode is CUDAGraphMode.FULL and _any_batch(vllm_config):
            largest = max(largest, scheduler.max_num_batched_tokens)
        sizes = [size for size in _CAPTURE_SIZES if size < largest]
        compilation.cudagraph_capture_sizes = [*sizes, min(largest, _CAPTURE_SIZES[-1])]


def _graph_mode(vllm_config: VllmConfig) -> CUDAGraphMode:
    from vllm.config import CUDAGraphMode

    if not capabilities.of_device().graphs:
        return CUDAGraphMode.NONE
    drafts = vllm_config.speculative_config is not None and _attends_natively(vllm_config)
    return CUDAGraphMode.FULL if drafts or _any_batch(vllm_config) else CUDAGraphMode.FULL_DECODE_ONLY


def _any_batch(vllm_config: VllmConfig) -> bool:
    """Say whether steps with prompts are in graphs as those of decode are.

    Some attention is launched by what a prompt holds.
    """
    from npu_platform.graphs.padding import goes_by_tokens

    if not goes_by_tokens(vllm_config) or _connector_works_between_layers(vllm_config):
        return False
    model = vllm_config.model_config
    return model.rswa_window is None and model.attention_chunk_size is None


def _connector_works_between_layers(vllm_config: VllmConfig) -> bool:
    """Say whether a connector may load or save what a layer attends to between two layers: graphs have no room for it.

    vLLM asks connectors for less, whether graphs of pieces are too much. npu-kvconnector's say it by an attribute of
    their class, ``works_between_steps``.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return vllm_config.cache_config.kv_offloading_size is not None  # makes one later
    connector = KVConnectorFactory.get_connector_class(transfer)
    return not getattr(connector, "works_between_steps", False)


def _attends_natively(vllm_config: VllmConfig) -> bool:
    """Say whether attention reads all that changes by step on the device, as a graph of any batch must."""
    from npu_platform.attention import kernels

    model = vllm_config.model_config
    return model is not None and kernels.native_attention(model.get_head_size())
