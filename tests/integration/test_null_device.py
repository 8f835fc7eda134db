"""The null device: ops keep shapes, and vLLM's engine schedules a model that the host could not hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import transformers

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = """
import torch, torch.nn.functional as F

# Shapes, strides and dtypes are those of the CPU's kernels.
def ops(t, i, image, b):
    yield t @ t.mT
    yield F.linear(t, t, t[:, 0])
    yield from (t.softmax(-1), t.exp(), t.sum(0), t.mean(dtype=torch.float64), t.t().contiguous(), t.to(torch.bfloat16), t > 0)
    yield from (torch.cat((t, t)), torch.stack((t, t), 1), t.index_select(0, i), t[i], F.embedding(i, t), t[1:, ::2].clone())
    yield from (*t.topk(2), *t.sort(dim=0), t.argmax(-1), t.cumsum(0), t.repeat(2, 3), t.max(), torch.where(b, t, 1.0))
    yield from (t.add_(1), t[0].fill_(2), torch.add(t, t, out=torch.empty(0, device=t.device)), torch.einsum("ij,kj->ik", t, t))
    yield from (F.layer_norm(t, (6,)), F.rms_norm(t, (6,)), F.silu(t), F.conv2d(image, image), F.max_pool2d(image, 2))
    yield F.scaled_dot_product_attention(image, image, image, is_causal=True)
    yield from (torch.arange(7, device=t.device), torch.full((2,), 3, device=t.device), torch.rand(3, device=t.device))
    yield from t.split(2)
    yield from (t.bernoulli(0.5), F.dropout(t), torch.zeros_like(t), t.masked_fill(b, 0), t.scatter(0, i[:, None], t))

def geometry(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype

arguments = torch.randn(4, 6), torch.tensor([1, 0, 3, 3]), torch.randn(2, 2, 8, 8), torch.rand(4, 6) > 0.5
with torch.inference_mode():
    theirs = list(ops(*(a.clone() for a in arguments)))
    ours = list(ops(*(a.to("npu") for a in arguments)))
assert len(ours) == len(theirs)
for number, (our, their) in enumerate(zip(ours, theirs)):
    assert our.device.type == "npu" and geometry(our) == geometry(their), (number, geometry(our), geometry(their))

# Where a shape depends on values, the values are zeros.
t, b = arguments[0].to("npu"), arguments[3].to("npu")
assert t.nonzero().shape == (0, 2) and t[b].shape == (0,) and t.masked_select(b).shape == (0,)
assert t.unique().shape == (1,)

# A layer forward and backward, and its optimizer.
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 2)).to("npu")
optimizer = torch.optim.AdamW(model.parameters())
loss = F.cross_entropy(model(t), torch.zeros(4, dtype=torch.long, device="npu"))
loss.backward()
optimizer.step()
assert loss.item() == 0 and model[0].weight.grad.shape == (5, 6)

# An op with a CPU kernel alone runs it on zeros, for the shape.
library = torch.library.Library("null_test", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: torch.cat((x, x + 1)), "CPU")
library.define("fill(Tensor(a!) x) -> ()")
library.impl("fill", lambda x: (x.fill_(1), None)[1], "CPU")
assert torch.ops.null_test.twice(t).shape == (8, 6) and torch.ops.null_test.twice(t).sum().item() == 0
torch.ops.null_test.fill(t)
assert t.sum().item() == 0
print("all well")
"""


def test_shapes() -> None:
    done = run_program(SHAPES, NPU_DEVICE="null")
    assert done.stdout == "all well\n", done.stderr


PROMPT, NEW, REQUESTS = 100, 60, 32
BLOCK, BLOCKS = 16, 200  # tokens, and blocks of the cache: 3,200 tokens, where the requests come to 5,120
LAYERS, KV_HEADS, HEAD = 80, 8, 128


def llama_70b(folder: Path) -> Path:
    """Write the configuration alone: vLLM makes the weights."""
    shape = {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 8192,
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
    }
    transformers.LlamaConfig(**shape).save_pretrained(folder)
    return folder


def test_schedule_of_a_large_model(tmp_path: Path) -> None:
    rounds = [
        {"prompts": models.prompt_token_ids([PROMPT] * REQUESTS), "sampling": {"temperature": 0.0, "max_tokens": NEW}}
    ]
    run = run_engine(
        tmp_path / "run",
        llama_70b(tmp_path / "model"),
        rounds,
        environ={"NPU_DEVICE": "null", "NPU_SIMULATOR_MEMORY": "160GiB"},
        load_format="dummy",
        block_size=BLOCK,
        kv_cache_memory_bytes=BLOCKS * BLOCK * LAYERS * 2 * KV_HEADS * HEAD * 2,
        max_model_len=1024,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=512,
        cudagraph_capture_sizes=[1, REQUESTS],
    )
    assert run.platform == "npu"
    assert (
        "model runner: The V2 model runner counts tokens on the device, and the null device computes nothing" in run.log
    )
    assert run.graphs_captured > 0
    assert run.tokens(0) == [[0] * NEW] * REQUESTS  # what the device computes reads as zero
    assert run.metrics["vllm:num_preemptions"] > 0  # the cache is smaller than the requests
    weights = re.search(r"Model loading took ([\d.]+) GiB", run.log)
    assert weights is not None, run.log[-3000:]
    assert 131 < float(weights.group(1)) < 132  # 70.55 billion parameters of 2 bytes
