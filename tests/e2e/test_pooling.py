"""Embeddings of encoders on npu equal transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from tests.support import models
from tests.support.engine_run import run_engine

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [1, 2, 5, 15, 16, 17, 33, 100, 300, 500]


@pytest.mark.parametrize("name", models.ENCODERS)
def test_embeddings_of_mixed_batches(name: str, tmp_path: Path) -> None:
    folder = models.ENCODERS[name](tmp_path / "model")
    prompts = models.prompt_token_ids(LENGTHS)
    settings = {"runner": "pooling", "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 1024}
    run = run_engine(tmp_path, folder, [{"prompts": prompts}, {"prompts": prompts[::-1]}], **settings)
    assert run.platform == "npu"
    reference = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    for prompt, output, again in zip(prompts, run.rounds[0], run.rounds[1][::-1], strict=True):
        with torch.inference_mode():
            expected = torch.nn.functional.normalize(reference(torch.tensor([prompt])).last_hidden_state[0, 0], dim=0)
        for answer in (output, again):
            torch.testing.assert_close(torch.tensor(answer["embedding"]), expected, atol=2e-5, rtol=0)
