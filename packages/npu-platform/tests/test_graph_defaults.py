"""Which graphs an engine captures when nobody has said which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from tests.support import models

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_qwen3(tmp_path_factory.mktemp("graphs") / "model")


def configured(model: Path, **engine: Any) -> VllmConfig:
    return EngineArgs(model=str(model), skip_tokenizer_init=True, max_model_len=256, **engine).create_engine_config()


@pytest.mark.usefixtures("npu_ops")  # which has the attention that any batch's graph needs
def test_steps_with_some_drafts_have_graphs(model: Path) -> None:
    config = configured(model, speculative_config=NGRAM)
    compilation = config.compilation_config
    mode = compilation.resolve_cudagraph_mode_and_sizes(AttentionCGSupport.ALWAYS, "npu", 4)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(mode, 4)
    for tokens in range(1, compilation.max_cudagraph_capture_size + 1):
        found, batch = dispatcher.dispatch(tokens, uniform_decode=False)
        assert found is CUDAGraphMode.FULL
        assert batch.num_tokens < tokens + 8


def test_the_largest_graph_holds_all_requests_with_their_drafts(model: Path) -> None:
    compilation = configured(model, speculative_config=NGRAM, max_num_seqs=3).compilation_config
    assert compilation.cudagraph_capture_sizes == [1, 2, 4, 8, 12]


def test_without_drafts_decode_has_graphs(model: Path) -> None:
    compilation = configured(model).compilation_config
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.cudagraph_capture_sizes == [1, 2, 4, *range(8, 129, 8)]


def test_what_the_user_chose_stays(model: Path) -> None:
    chosen = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8]}
    compilation = configured(model, speculative_config=NGRAM, compilation_config=chosen).compilation_config
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.cudagraph_capture_sizes == [4, 8]
