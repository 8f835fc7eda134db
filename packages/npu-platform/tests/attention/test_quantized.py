"""The KV cache in codes: its pages, and npu-ops' kernels against the plain-torch ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from npu_platform.attention import kernels, reference
from npu_platform.attention.quantized import QUANTIZED_CACHES, split_codes


@pytest.fixture(params=QUANTIZED_CACHES)
def page(request):
    """A cache [blocks, heads, block, bytes] as vLLM allocates it, the format's name, and the layer's scales."""
    name = request.param
    content = 2 * 16 + (8 if name.endswith("per_token_head") else 0)
    dtype = torch.int8 if name.startswith("int8") else torch.uint8
    layer = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor([0.01, 0.03]))
    return torch.zeros(6, 2, 4, content, dtype=dtype), name, layer


def test_codes_and_scales_do_not_overlap(page):
    cache, name, layer = page
    keys, values, key_scale, value_scale = split_codes(cache, name, 16, layer)
    assert keys.shape == values.shape == (6, 2, 4, 16)
    keys.view(torch.uint8).fill_(1)
    values.view(torch.uint8).fill_(1)
    if not name.endswith("per_token_head"):
        assert key_scale is layer._k_scale
        assert cache.all()
        return
    key_scale.fill_(0.25)
    value_scale.fill_(0.5)
    assert (keys.view(torch.uint8) == 1).all()
    assert (values.view(torch.uint8) == 1).all()
    assert (key_scale == 0.25).all()


@pytest.mark.parametrize("module", [kernels, reference])
def test_what_is_written_is_attended_to(page, module):
    cache, name, layer = page
    caches = split_codes(cache, name, 16, layer)
    torch.manual_seed(0)
    key, value = torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    slots = torch.tensor([8, 9, 10, 11, 20, 21, 22, 23, 0])  # blocks 2, 5, 0
    module.write_quantized_cache(key, value, *caches, slots)
    query, out = torch.randn(9, 4, 16), torch.zeros(9, 4, 16)
    table, starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 5, 0]], [0, 9], [9]))
    options = (0.25, True, -1, -1, 0.0, None, None)
    module.paged_attention_quantized(out, query, *caches, table, starts, lengths, *options)
    exact = torch.zeros_like(out)
    module.varlen_attention(exact, query, key, value, starts, *options)
    assert (out - exact).abs().max() < 0.15
    assert torch.nn.functional.cosine_similarity(out, exact, dim=-1).min() > 0.99
