"""What the V2 runner copies beside a step, on npu streams: outputs, grammars, drafts, tokens between pipeline stages.

Each class is vLLM's, with copies of the methods that name streams of CUDA.
"""

from __future__ import annotations

import contextlib

from vllm.v1.worker.gpu import async_utils
from vllm.v1.worker.gpu.async_utils import AsyncOutput, AsyncPoolingOutput
from vllm.v1.worker.gpu.pp_utils import PPHandler
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from npu_platform.compat import with_npu_streams

__all__ = [
    "NPUAsyncOutput",
    "NPUAsyncPoolingOutput",
    "NPUDraftTokensHandler",
    "NPUPPHandler",
    "NPUStructuredOutputsWorker",
]

_stream = contextlib.contextmanager(with_npu_streams(async_utils.stream))


class NPUAsyncOutput(AsyncOutput):
    """The tokens of a step on their way to the host."""

    __init__ = with_npu_streams(AsyncOutput.__init__, stream=_stream)


class NPUAsyncPoolingOutput(AsyncPoolingOutput):
    """The embeddings of a step on their way to the host."""

    __init__ = with_npu_streams(AsyncPoolingOutput.__init__, stream=_stream)


class NPUStructuredOutputsWorker(StructuredOutputsWorker):
    """The masks of grammars on their way to the device."""

    __init__ = with_npu_streams(StructuredOutputsWorker.__init__)
    apply_grammar_bitmask = with_npu_streams(StructuredOutputsWorker.apply_grammar_bitmask)


class NPUDraftTokensHandler(DraftTokensHandler):
    """Drafts on their way to the scheduler, whose grammars judge them."""

    __init__ = with_npu_streams(DraftTokensHandler.__init__)
    set_draft_tokens = with_npu_streams(DraftTokensHandler.set_draft_tokens)


class NPUPPHandler(PPHandler):
    """Sampled tokens on their way from the last pipeline stage to the others."""

    __init__ = with_npu_streams(PPHandler.__init__)
    broadcast = with_npu_streams(PPHandler.broadcast)
    broadcast_drafts = with_npu_streams(PPHandler.broadcast_drafts)
    receive = with_npu_streams(PPHandler.receive)
