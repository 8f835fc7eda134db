"""Which graphs an engine captures when nobody has said which."""

from __future__ import annotations

from collections.abc import Callable
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
    """Where prompts have none."""
    chunks = {"attention_chunk_size": 64}
    compilation = configured(model, speculative_config=NGRAM, max_num_seqs=3, hf_overrides=chunks).compilation_config
    assert compilation.cudagraph_capture_sizes == [1, 2, 4, 8, 12]


@pytest.mark.usefixtures("npu_ops")
def test_steps_of_any_kind_have_graphs(model: Path) -> None:
    """Prompts among them, however few requests there are at once."""
    for most in (2, 256):
        compilation = configured(model, max_num_seqs=most).compilation_config
        assert compilation.cudagraph_mode is CUDAGraphMode.FULL
        assert compilation.cudagraph_capture_sizes == [1, 2, 4, *range(8, 129, 8)]


@pytest.mark.usefixtures("npu_ops")
def test_no_graph_is_larger_than_a_step(model: Path) -> None:
    compilation = configured(model, max_num_seqs=2, max_num_batched_tokens=20).compilation_config
    assert compilation.cudagraph_capture_sizes == [1, 2, 4, 8, 16, 20]


OF_DECODES: dict[str, dict[str, Any]] = {
    "a connector": {"kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}},
    "attention in chunks": {"hf_overrides": {"attention_chunk_size": 64}},
}


@pytest.mark.usefixtures("npu_ops")
@pytest.mark.parametrize("case", OF_DECODES)
def test_decode_alone_has_graphs_where_a_prompt_cannot(model: Path, case: str) -> None:
    compilation = configured(model, **OF_DECODES[case], max_num_seqs=4).compilation_config
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.cudagraph_capture_sizes == [1, 2, 4]


@pytest.mark.usefixtures("npu_ops")
@pytest.mark.parametrize("name", ["NPUOffloadConnector", "NPUNixlConnector"])
def test_connectors_that_work_between_steps_leave_prompts_their_graphs(model: Path, name: str) -> None:
    pytest.importorskip("npu_kvconnector")
    extra = {"cpu_bytes_to_use": "1MiB"} if name == "NPUOffloadConnector" else {}
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    compilation = configured(model, kv_transfer_config=transfer).compilation_config
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL


@pytest.mark.usefixtures("npu_ops")
@pytest.mark.parametrize("make", [models.tiny_deepseek_v2, models.tiny_granite_hybrid], ids=["latents", "states"])
def test_decode_alone_has_graphs_where_rows_are_no_tokens(make: Callable[..., Path], tmp_path: Path) -> None:
    compilation = configured(make(tmp_path / "model")).compilation_config
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY


def test_what_the_user_chose_stays(model: Path) -> None:
    chosen = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8]}
    compilation = configured(model, speculative_config=NGRAM, compilation_config=chosen).compilation_config
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.cudagraph_capture_sizes == [4, 8]
