"""The KV cache in codes: its pages, and npu-ops' kernels against the plain-torch ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.fixture(params=["kernels", "reference"])
def module(request):
    """npu-ops' kernels, as kernels.py takes them when they are there, and plain torch."""
    if request.param == "reference":
        return reference
    request.getfixturevalue("npu_ops")
    kernels.has_native_ops.cache_clear()
    return kernels


class Called(TorchDispatchMode):
    """Collects the names of npu-ops' ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "npu_ops":
            self.names.add(func.name().removeprefix("npu_ops::"))
        return func(*args, **(kwargs or {}))


def test_what_is_written_is_attended_to(page, module):
    cache, name, layer = page
    caches = split_codes(cache, name, 16, layer)
    torch.manual_seed(0)
    key, value = torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    slots = torch.tensor([8, 9, 10, 11, 20, 21, 22, 23, 0])  # blocks 2, 5, 0
    query, out = torch.randn(9, 4, 16), torch.zeros(9, 4, 16)
    table, starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 5, 0]], [0, 9], [9]))
    options = (0.25, True, -1, -1, 0.0, None, None)
    with Called() as called:
        module.write_quantized_cache(key, value, *caches, slots)
        module.paged_attention_quantized(out, query, *caches, table, starts, lengths, *options)
    ops = {"reshape_and_cache_quantized", "paged_attention_quantized"}
    assert called.names == (ops if module is kernels else set())
    kept = [meaning(codes, scale, slots) for codes, scale in (caches[::2], caches[1::2])]
    for meant, given in zip(kept, (key, value), strict=True):
        # e4m3 has three bits behind the point, int8 127 steps up to the largest value
        step = meant.abs() / 16 + 1e-3 if caches[0].dtype == torch.float8_e4m3fn else given.abs().amax(-1, True) / 250
        assert ((meant - given).abs() <= step).all()
    exact = torch.zeros_like(out)
    reference.varlen_attention(exact, query, *kept, starts, *options)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)


def meaning(codes, scale, slots):
    """Return what the codes of these slots stand for: float32 [slots, heads, dim]."""
    blocks, places = slots // codes.shape[2], slots % codes.shape[2]
    scale = scale[blocks, :, places][..., None] if scale.dim() == 3 else scale.view(-1, 1)
    return codes[blocks, :, places].float() * scale
