from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

import npu_ops
from npu_ops.op import OPS

# Not of a generator: that is not seeded yet when this is read.
ROUTED = (
    torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.3, 0.7]]),
    torch.tensor([[0, 3], [1, 2], [3, 1]], dtype=torch.int32),
    None,
    None,
    None,
)
GATE = ("silu", 1.0, 0.0, float("inf"), False)
CASES = {
    "rms_norm": lambda: (torch.randn(3, 16), torch.randn(16), 1e-6),
    "gemma_rms_norm": lambda: (torch.randn(3, 16), torch.randn(16), 1e-6),
    "fused_add_rms_norm": lambda: (torch.randn(3, 16), torch.randn(3, 16), torch.randn(16), 1e-6),
    "fused_add_gemma_rms_norm": lambda: (torch.randn(3, 16), torch.randn(3, 16), torch.randn(16), 1e-6),
    "silu_and_mul": lambda: (torch.randn(3, 16),),
    "gelu_and_mul": lambda: (torch.randn(3, 16), True),
    "gelu": lambda: (torch.randn(3, 16), False),
    "quick_gelu": lambda: (torch.randn(3, 16),),
    "relu2": lambda: (torch.randn(3, 16),),
    "mul_and_silu": lambda: (torch.randn(3, 16),),
    "fatrelu_and_mul": lambda: (torch.randn(3, 16), 0.1),
    "situ_and_mul": lambda: (torch.randn(3, 16), 1.5, 2.0),
    "silu_and_mul_with_clamp": lambda: (torch.randn(3, 16), 0.8, 1.7, 1.0),
    "swigluoai_and_mul": lambda: (torch.randn(3, 16), 1.7, 0.8),
    "swiglustep_and_mul": lambda: (torch.randn(3, 16), 0.5),
    "gelu_and_mul_sparse": lambda: (torch.randn(3, 16), 0.4, True),
    "xielu": lambda: (torch.randn(3, 16), torch.randn(1), torch.randn(1), 0.5, -1e-6),
    "layer_norm": lambda: (torch.randn(3, 16), torch.randn(16), torch.randn(16), 1e-6, True),
    "linear": lambda: (torch.randn(3, 16), torch.randn(8, 16), None),
    "linear_silu_and_mul": lambda: (torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)),
    "linear_add_": lambda: (torch.randn(3, 8), torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)),
    "lora_shrink": lambda: (
        torch.zeros(1, 3, 4),
        torch.randn(3, 16),
        [torch.randn(2, 1, 4, 16)],
        torch.tensor([1, -1, 0]),
        0.5,
    ),
    "lora_expand": lambda: (
        torch.randn(3, 16),
        torch.randn(1, 3, 4),
        [torch.randn(2, 1, 12, 4)],
        torch.tensor([1, -1, 0]),
        [12],
        2,
        True,
    ),
    "select_experts": lambda: (torch.randn(3, 8), 2, "sigmoid", True, 1.5, torch.randn(8), 4, 2),
    "weight_only_experts": lambda: (
        torch.randn(3, 32),
        torch.randint(0, 256, (4, 2, 8, 64), dtype=torch.uint8),
        torch.rand(4, 2, 1, 32) * 1e-2,
        None,
        torch.randint(0, 256, (4, 1, 8, 64), dtype=torch.uint8),
        torch.rand(4, 1, 1, 32) * 1e-3,
        None,
        *ROUTED,
        32,
        32,
        *GATE,
    ),
    "int8_experts": lambda: (
        torch.randn(3, 32),
        torch.randint(0, 256, (4, 2, 8, 128), dtype=torch.uint8),
        torch.rand(4, 64) * 1e-3,
        torch.randint(0, 256, (4, 1, 8, 128), dtype=torch.uint8),
        torch.rand(4, 32) * 1e-4,
        *ROUTED,
        32,
        *GATE,
    ),
    "fp8_experts": lambda: (
        torch.randn(3, 32),
        torch.randn(4, 64, 32).to(torch.float8_e4m3fn).view(torch.uint8),
        torch.rand(4, 64),
        torch.randn(4, 32, 32).to(torch.float8_e4m3fn).view(torch.uint8),
        torch.rand(4, 32),
        *ROUTED,
        None,
        None,
        0,
        1,
        32,
        *GATE,
    ),
    "fused_experts": lambda: (
        torch.randn(3, 16),
        torch.randn(4, 24, 16),
        torch.randn(4, 16, 12),
        torch.rand(3, 2),
        torch.tensor([[0, 3], [1, 2], [3, 1]], dtype=torch.int32),
        None,
        None,
        None,
        "silu",
        False,
        1.0,
        0.0,
        float("inf"),
        False,
    ),
    "weight_only_linear": lambda: (
        torch.randn(3, 16),
        torch.randint(0, 256, (1, 4, 64)).to(torch.uint8),
        torch.rand(1, 2, 32),
        torch.randint(0, 16, (1, 2, 32)).to(torch.int8),
        torch.randperm(16).int(),
        torch.randn(20),
        20,
        8,
    ),
    "dynamic_int8_quant": lambda: (torch.randn(3, 16), False),
    "rms_norm_dynamic_quant": lambda: (
        torch.randn(3, 16),
        torch.randn(3, 16),
        torch.randn(16),
        1e-6,
        True,
        torch.int8,
    ),
    "rms_norm_static_quant": lambda: (torch.randn(3, 16), None, torch.randn(16), 1e-6, torch.rand(1), torch.int8),
    "qk_norm_rotary_and_cache": lambda: (
        torch.tensor([0, 3]),
        torch.randn(2, 4, 8),
        torch.randn(2, 2, 8),
        torch.randn(2, 2, 8),
        torch.randn(8),
        torch.randn(8),
        1e-6,
        torch.randn(5, 8),
        True,
        torch.zeros(2, 2, 4, 8),
        torch.zeros(2, 2, 4, 8),
        torch.tensor([5, -1]),
    ),
    "static_int8_quant": lambda: (torch.randn(3, 16), torch.rand(1), None),
    "int8_linear": lambda: (
        torch.randint(-128, 128, (3, 16)).to(torch.int8),
        torch.rand(3, 1) * 0.01,
        None,
        torch.randint(0, 256, (1, 4, 128)).to(torch.uint8),
        torch.rand(32) * 0.01,
        None,
        torch.randn(20),
        20,
        torch.float32,
    ),
    "int8_linear_dynamic": lambda: (
        torch.randn(3, 16),
        True,
        torch.randint(0, 256, (1, 4, 128)).to(torch.uint8),
        torch.rand(32) * 0.01,
        None,
        torch.randn(20),
        20,
    ),
    "fp8_linear": lambda: (
        torch.randn(3, 16),
        torch.randn(8, 16).to(torch.float8_e4m3fn).view(torch.uint8),  # torch compares no fp8
        torch.rand(8),
        None,
        None,
        0,
        1,
        16,
    ),
    "embedding": lambda: (torch.tensor([1, 2]), torch.randn(9, 16)),
    "argmax": lambda: (torch.randn(3, 50),),
    "top_k_top_p": lambda: (torch.randn(3, 50), torch.tensor([3, 4, 5]), torch.tensor([0.5, 0.6, 0.7])),
    "min_p": lambda: (torch.randn(3, 50), torch.tensor([0.0, 0.3, 0.6])),
    "random_sample": lambda: (torch.randn(3, 50), torch.rand(3, dtype=torch.float64)),
    "apply_penalties": lambda: (
        torch.randn(3, 50),
        torch.randint(0, 51, (3, 9)),
        torch.randint(-1, 51, (3, 7)),
        torch.rand(3),
        torch.rand(3),
        torch.rand(3) + 0.5,
    ),
    "seeded_sample": lambda: (
        torch.randn(3, 50),
        torch.tensor([1, 0, -1]),
        torch.tensor([0.0, 0.8]),
        torch.tensor([5, 6]),
        torch.tensor([9, 9, 9]),
    ),
    "counted_penalties": lambda: (
        torch.randn(3, 50),
        torch.tensor([1, 0, -1]),
        torch.tensor([7, 8, 9], dtype=torch.int32),
        torch.tensor([0, 1, 0], dtype=torch.int32),
        torch.rand(2),
        torch.rand(2),
        torch.rand(2) + 0.5,
        torch.randint(0, 2**31, (2, 2), dtype=torch.int32),
        torch.randint(0, 2, (2, 50), dtype=torch.int32),
    ),
    "top_logprobs": lambda: (torch.randn(3, 50), torch.tensor([4, 0, 49]), 5),
    "recovered_tokens": lambda: (
        torch.zeros(3, dtype=torch.int32),
        torch.tensor([2, 3], dtype=torch.int32),
        torch.tensor([4, 0, 49], dtype=torch.int32),
        None,
        torch.rand(3, 50),
        torch.rand(2, 50),
    ),
    "gated_rms_norm": lambda: (torch.randn(3, 16), torch.randn(3, 16), torch.randn(16), 1e-6, 8, False, False),
    "causal_conv1d": lambda: (
        torch.randn(3, 16),
        torch.randn(16, 4),
        torch.randn(16),
        torch.randn(4, 16, 3),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.tensor([True, False]),
        True,
    ),
    "selective_scan": lambda: (
        torch.zeros(3, 4, 8),
        torch.randn(3, 4, 8),
        torch.randn(3, 4),
        -torch.rand(4),
        torch.randn(3, 2, 16),
        torch.randn(3, 2, 16),
        torch.randn(4),
        torch.randn(4),
        torch.randn(3, 4, 8),
        torch.randn(4, 4, 8, 16),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.tensor([True, False]),
    ),
    "gated_delta_rule": lambda: (
        torch.zeros(3, 4, 8),
        torch.randn(3, 96),
        torch.randn(3, 4),
        torch.randn(3, 4),
        torch.randn(4),
        torch.randn(4),
        torch.randn(4, 4, 8, 16),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.tensor([True, False]),
    ),
    "rotary_embedding": lambda: (torch.arange(3), torch.randn(3, 32), torch.randn(3, 16), 16, torch.randn(9, 16), True),
    "multimodal_rotary_embedding": lambda: (
        torch.randint(0, 9, (3, 3)),
        torch.randn(3, 32),
        None,
        16,
        torch.randn(9, 16),
        True,
        [4, 2, 2],
        False,
    ),
    "reshape_and_cache": lambda: (
        torch.randn(2, 1, 8),
        torch.randn(2, 1, 8),
        torch.zeros(3, 1, 4, 8),
        torch.zeros(3, 1, 4, 8),
        torch.tensor([5, 1]),
    ),
    "copy_pages": lambda: (
        [torch.arange(64).to(torch.int8)],
        torch.zeros(64, dtype=torch.int8),
        [2, 32, 4, 1, 0, 0, 4, 2],
        torch.tensor([[0, 8], [12, 40]]),
        torch.tensor([1]),
        True,
        float("inf"),
    ),
    "reshape_and_cache_quantized": lambda: (
        torch.randn(2, 1, 8),
        torch.randn(2, 1, 8),
        torch.zeros(3, 1, 4, 8, dtype=torch.int8),
        torch.zeros(3, 1, 4, 8, dtype=torch.int8),
        torch.zeros(3, 1, 4),
        torch.zeros(3, 1, 4),
        torch.tensor([5, 1]),
    ),
    "paged_attention_quantized": lambda: (
        torch.zeros(2, 2, 8),
        torch.randn(2, 2, 8),
        torch.randint(-20, 20, (3, 1, 4, 8), dtype=torch.int8),  # opcheck cannot multiply float8
        torch.randint(-20, 20, (3, 1, 4, 8), dtype=torch.int8),
        torch.tensor(0.05),
        torch.tensor(0.1),
        torch.tensor([[0, 2]], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
        0.3,
        True,
        -1,
        -1,
        0.0,
        None,
        None,
    ),
    "paged_attention": lambda: (
        torch.zeros(2, 2, 8),
        torch.randn(2, 2, 8),
        torch.randn(3, 1, 4, 8),
        torch.randn(3, 1, 4, 8),
        torch.tensor([[0, 2]], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
        0.3,
        True,
        -1,
        -1,
        0.0,
        None,
        None,
    ),
    "varlen_attention": lambda: (
        torch.zeros(4, 2, 8),
        torch.randn(4, 2, 8),
        torch.randn(4, 1, 8),
        torch.randn(4, 1, 8),
        torch.tensor([0, 4], dtype=torch.int32),
        0.3,
        False,
        -1,
        -1,
        0.0,
        None,
        None,
        torch.zeros(4, 2),
    ),
}


def test_every_op_has_a_case():
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize("name", CASES)
def test_schema_and_meta_function_are_true(name):
    opcheck(getattr(torch.ops.npu_ops, name).default, CASES[name](), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference(name):
    """Values and in-place effects, whatever the kernel is."""
    args = CASES[name]()
    copy = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    actual, expected = OPS[name](*args), OPS[name].reference(*copy)
    written, expected_written = ([a for a in values if isinstance(a, torch.Tensor)] for values in (args, copy))
    torch.testing.assert_close((actual, written), (expected, expected_written), rtol=1e-5, atol=1e-5)


OTHERS = {"causal_conv1d", "fused_experts", "weight_only_experts", "int8_experts", "fp8_experts"}
NOT_OF_X_ALONE = {"gated_rms_norm", "int8_linear", "rms_norm_dynamic_quant"}  # what goes with x has its rows
OF_ROWS = sorted(
    {name for name, op in OPS.items() if op.schema.startswith(f"{name}(Tensor x")} - OTHERS - NOT_OF_X_ALONE
)


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("shape", [(0, 3), (5, 0, 0), (17, 0, 0, 2)])
def test_no_rows_give_no_rows(name, shape):
    """Whatever strides a tensor of no rows has."""
    x, *others = CASES[name]()
    strided = x.new_zeros(5, 4, x.shape[-1])[:0, :3] if shape == (0, 3) else x.new_zeros(*shape, x.shape[-1])
    result = getattr(torch.ops.npu_ops, name)(strided, *others)
    assert (result[0] if isinstance(result, tuple) else result).shape[:-1] == shape


def test_nothing_is_added_to_no_rows():
    residual = torch.zeros(0, 3, 8)
    torch.ops.npu_ops.linear_add_(residual, torch.zeros(5, 4, 16)[:0, :3], torch.randn(8, 16), None)


def on(device, value):
    """`value` with its tensors on the device."""
    if isinstance(value, list):
        return [on(device, each) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def has_tensors(value):
    return isinstance(value, torch.Tensor) or (isinstance(value, list) and any(map(has_tensors, value)))


@pytest.mark.parametrize("name", sorted(set(CASES) - {"copy_pages"}))
def test_tensors_of_two_devices_are_refused(name, npu):
    """A recorded kernel would read the memory of a CPU tensor long after it is gone."""
    op, args = getattr(torch.ops.npu_ops, name), CASES[name]()
    op(*(on(npu, value) for value in args))
    places = [i for i, value in enumerate(args) if has_tensors(value)]
    for place in places if len(places) > 1 else []:
        mixed = [on("cpu" if at == place else npu, each) for at, each in enumerate(args)]
        with pytest.raises(RuntimeError, match="must be on the device of the first argument"):
            op(*mixed)


def test_optional_tensors_of_another_device_are_refused(npu):
    ops, x, one = torch.ops.npu_ops, torch.randn(3, 32).to(npu), torch.ones(1)
    codes, scales = torch.zeros(1, 8, 64, dtype=torch.uint8).to(npu), torch.ones(1, 1, 32).to(npu)
    for place, value in ((3, scales.cpu().char()), (4, torch.arange(32).int()), (5, torch.ones(20))):
        args = [x, codes, scales, None, None, None, 20, 32]
        args[place] = value
        with pytest.raises(RuntimeError, match="device"):
            ops.weight_only_linear(*args)
    fp8, by_row = torch.zeros(8, 32, dtype=torch.uint8).to(npu), torch.ones(8).to(npu)
    for bias, scale in ((torch.ones(8), None), (None, one)):
        with pytest.raises(RuntimeError, match="device"):
            ops.fp8_linear(x, fp8, by_row, bias, scale, 0, 1, 32)
    with pytest.raises(RuntimeError, match="device"):
        ops.static_int8_quant(x, one.to(npu), one.int())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("rotary_embedding", 1),
        ("linear_add_", 0),
        ("min_p", 0),
        ("top_k_top_p", 0),
        ("apply_penalties", 0),
        ("counted_penalties", 0),
        ("lora_expand", 0),
        ("reshape_and_cache", 2),
        ("paged_attention", 0),
        ("selective_scan", 0),
        ("gated_delta_rule", 0),
        ("causal_conv1d", 3),
    ],
)
def test_expanded_tensors_are_not_written(name, place):
    """Each of the elements that share memory would be written, one over the other."""
    args = list(CASES[name]())
    args[place] = args[place][:1].expand(args[place].shape)
    with pytest.raises(RuntimeError, match="no dimension may be expanded"):
        getattr(torch.ops.npu_ops, name)(*args)


def test_compiles_without_graph_breaks():
    @torch.compile(fullgraph=True, backend="eager")
    def block(x, weight, norm):
        return torch.ops.npu_ops.silu_and_mul(
            torch.ops.npu_ops.linear(torch.ops.npu_ops.rms_norm(x, norm, 1e-6), weight, None)
        )

    x, weight, norm = torch.randn(2, 16), torch.randn(32, 16), torch.ones(16)
    expected = torch.ops.npu_ops.silu_and_mul(
        torch.ops.npu_ops.linear(torch.ops.npu_ops.rms_norm(x, norm, 1e-6), weight, None)
    )
    torch.testing.assert_close(block(x, weight, norm), expected)


def test_references_serve_without_the_native_library():
    script = (
        "import importlib.util, sys, torch\n"
        "spec = importlib.util.find_spec('npu_ops')\n"
        "package = importlib.util.module_from_spec(spec)\n"
        "sys.modules['npu_ops'] = package\n"
        "import npu_ops.definitions\n"
        "assert not hasattr(torch.ops.npu_ops, '_isa')\n"
        "y = torch.ops.npu_ops.silu_and_mul(torch.ones(1, 4))\n"
        "assert y.shape == (1, 2) and abs(y[0, 0].item() - 0.7310586) < 1e-6\n"
        "m = torch.ops.npu_ops.rms_norm(torch.ones(2, 4, device='meta'), torch.ones(4, device='meta'), 1e-6)\n"
        "assert m.shape == (2, 4)\n"
        "print('served')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "served", run.stderr


def test_a_kernel_of_ones_own_goes_on_top():
    library = torch.library.Library("npu_ops", "IMPL")
    library.impl("relu2", lambda x: x + 41, "CPU", allow_override=True)
    try:
        assert torch.ops.npu_ops.relu2(torch.ones(1)).item() == 42
    finally:
        library._destroy()
    assert torch.ops.npu_ops.relu2(torch.full((1,), 3.0)).item() == 9
    assert npu_ops.native.available()
