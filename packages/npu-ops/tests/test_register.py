"""Registration with vLLM, in a process of its own each time: vLLM's registries are global.

Those that register are forks of one process that has imported vLLM, which takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

PRELUDE = """
import torch, npu_ops
import vllm.platforms
from vllm.platforms.interface import Platform, PlatformEnum
class Ours(Platform):
    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    @classmethod
    def import_kernels(cls): pass
vllm.platforms._current_platform = Ours()
from vllm.config import VllmConfig, CompilationConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
npu_ops.register(); npu_ops.register()
config = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
"""
HOST = """
import json, os, sys, traceback
for line in sys.stdin:
    sys.stdout.flush()
    if os.fork() == 0:
        status = 1
        try:
            exec(json.loads(line), dict(globals()))
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(status)
    print("ended", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
ENVIRONMENT = {**os.environ, "VLLM_PLUGINS": "", "NPU_DEVICE": "off"}


@pytest.fixture(scope="module")
def registered():
    """Return a function that runs code where npu-ops has registered, and returns the words it prints."""
    command = [sys.executable, "-c", PRELUDE + HOST]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:

        def run(code):
            host.stdin.write(json.dumps(code) + "\n")
            host.stdin.flush()
            lines = []
            for line in host.stdout:
                if line.startswith("ended "):
                    assert line == "ended 0\n", "".join(lines)[-3000:]
                    return "".join(lines).split()
                lines.append(line)
            raise AssertionError("".join(lines)[-3000:])

        yield run
        host.stdin.close()


def test_does_nothing_on_a_platform_of_vllm():
    code = """
import npu_ops
from vllm.model_executor.custom_op import op_registry_oot
npu_ops.register()
print(len(op_registry_oot))
"""
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split()[-1] == "0"


LAYER_OF_ANOTHER = """
import logging, npu_ops
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
logging.getLogger("vllm.npu_ops").addHandler(logging.StreamHandler())
logging.getLogger("vllm.npu_ops").setLevel("INFO")
@SiluAndMul.register_oot(name="SiluAndMul")
class Theirs(SiluAndMul): ...
npu_ops.register()
print(op_registry_oot["SiluAndMul"] is Theirs, op_registry_oot["RMSNorm"].__name__)
"""


def test_a_layer_that_another_plugin_has_registered_stays():
    code = PRELUDE.replace("npu_ops.register(); npu_ops.register()", LAYER_OF_ANOTHER)
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "True NpuRMSNorm"
    assert "npu-ops leaves SiluAndMul to __main__.Theirs" in result.stderr


KERNEL_BEFORE = """
import torch
def mine(x): return x[..., :1].clone()
torch.library.impl("npu_ops::silu_and_mul", "PrivateUse1")(mine)
import npu_ops
torch.library.impl("npu_ops::relu2", "PrivateUse1")(mine)
x = torch.ones(2, 8, device="npu")
print(*(op(x).shape[-1] for op in (torch.ops.npu_ops.silu_and_mul, torch.ops.npu_ops.relu2)))
"""


def test_a_kernel_that_comes_too_early_is_named():
    pytest.importorskip("npu_platform")
    environ = {**ENVIRONMENT, "NPU_DEVICE": "simulator"}
    result = subprocess.run(
        [sys.executable, "-c", KERNEL_BEFORE], env=environ, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[-1:] == ["4 1"], result.stderr[-3000:]
    assert "are lost: import npu_ops first, then register silu_and_mul." in result.stderr


def test_adapters_wrap_a_router_as_any_replicated_layer(registered):
    code = """
from vllm.lora.layers import ReplicatedLinearWithLoRA
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
gate = op_registry_oot["GateLinear"]
assert issubclass(gate, GateLinear)
print(ReplicatedLinearWithLoRA.can_replace_layer(gate.__new__(gate), None, []))
"""
    assert registered(code) == ["True"]


def test_adapters_wrap_layers_of_a_subclass_of_vllms(registered):
    code = """
from vllm.lora.layers import MergedColumnParallelLinearWithLoRA, ReplicatedLinearWithLoRA
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear
class Users(ReplicatedLinear): ...
users, fused = (one.__new__(one) for one in (Users, DeepSeekV2FusedQkvAProjLinear))
print(ReplicatedLinearWithLoRA.can_replace_layer(users, None, []))
print(MergedColumnParallelLinearWithLoRA.can_replace_layer(fused, None, ["q", "kv"], None))
gate = op_registry_oot["GateLinear"]
print(isinstance(users, gate), isinstance(fused, op_registry_oot["RowParallelLinear"]))
"""
    assert registered(code)[-4:] == ["True", "True", "False", "False"]


def test_norms_activations_and_rotations_equal_vllms_own(registered):
    code = """
from vllm.model_executor.layers.layernorm import RMSNorm, GemmaRMSNorm
from vllm.model_executor.layers.activation import SiluAndMul, GeluAndMul, NewGELU, FastGELU, QuickGELU, GELU
from vllm.model_executor.layers.activation import FatreluAndMul, GeluAndMulSparse, MulAndSilu, SiluAndMulWithClamp
from vllm.model_executor.layers.activation import SituAndMul, SwigluOAIAndMul, SwigluStepAndMul, XIELU
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.nemotron import NemotronLayerNorm1P
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm import ir
torch.manual_seed(0)
near = lambda a, b: torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
with set_current_vllm_config(config), torch.inference_mode():
    for layer in (RMSNorm(32), GemmaRMSNorm(32), RMSNorm(32, var_hidden_size=16), RMSNorm(32, has_weight=False)):
        assert type(layer).__module__ == "npu_ops.layers.layernorm"
        x, r = torch.randn(3, 32), torch.randn(3, 32)
        near(layer(x.clone()), layer.forward_native(x))
        near(layer(x.clone(), r.clone()), layer.forward_native(x.clone(), r.clone()))
    for layer in (SiluAndMul(), GeluAndMul("none"), GeluAndMul("tanh"), NewGELU(), FastGELU(), QuickGELU(), GELU()):
        assert type(layer).__module__ == "npu_ops.layers.activation"
        x = torch.randn(3, 32)
        near(layer(x), layer.forward_native(x))
    gates = (FatreluAndMul(0.1), GeluAndMulSparse(0.9, "tanh"), MulAndSilu(), SiluAndMulWithClamp(0.8), SituAndMul(1.5, 2.0),
             SiluAndMulWithClamp(0.9, 1.7, 1.0), SituAndMul(1.5), SwigluOAIAndMul(), SwigluStepAndMul(0.5), XIELU(dtype=torch.float32))
    for layer in gates:
        assert type(layer).__module__ == "npu_ops.layers.gates"
        near(layer(x), layer.forward_native(x))
    bare = LayerNorm(32, elementwise_affine=False)
    for layer in (LayerNorm(32), LayerNorm(32, bias=False), bare, NemotronLayerNorm1P(32)):
        assert type(layer).__module__ == "npu_ops.layers.layernorm"
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        near(layer(x), layer.forward_native(x))
    near(layer(x, x + 1), layer.forward_native(x, x + 1))
    for neox in (True, False):
        rope = RotaryEmbedding(32, 16, 64, 10000, neox, torch.float32)
        assert type(rope).__module__ == "npu_ops.layers.rotary"
        positions, q, k = torch.arange(5), torch.randn(5, 128), torch.randn(5, 64)
        near(rope(positions, q.clone(), k.clone()), rope.forward_native(positions, q, k))
        near(rope(positions, q.clone(), None), rope.forward_native(positions, q, None))
    for interleaved in (False, True):
        rope = MRotaryEmbedding(32, 32, 64, 10000, True, torch.float32, [6, 5, 5], interleaved)
        for positions in (torch.arange(5), torch.randint(0, 60, (3, 5))):
            near(rope(positions, q.clone(), k.clone()), rope.forward_native(positions, q, k))
    for heads, kv_heads, size in ((4, 4, 72), (4, 2, 16)):
        attention = MMEncoderAttention(heads, size, num_kv_heads=kv_heads)
        assert type(attention).__module__ == "npu_ops.layers.encoder_attention"
        q, k, v = torch.randn(2, 9, heads * size), torch.randn(2, 9, kv_heads * size), torch.randn(2, 9, kv_heads * size)
        near(attention(q, k, v), attention.forward_native(q, k, v))
        near(attention(q[:1], k[:1], v[:1], starts), attention.forward_native(q[:1], k[:1], v[:1], starts))
    provider = ir.ops.rms_norm.impls["npu_ops"]
    x, w = torch.randn(3, 32), torch.randn(32)
    near(provider.impl_fn(x, w, 1e-6), ir.ops.rms_norm.impls["native"].impl_fn(x, w, 1e-6))
    fused = [ir.ops.fused_add_rms_norm.impls[n].impl_fn(x.clone(), x.clone(), w, 1e-6) for n in ("npu_ops", "native")]
    near(*fused)
    sparse = [ir.ops.gelu_and_mul_sparse.impls[n].impl_fn(x, 1.3, "none") for n in ("npu_ops", "native")]
    near(*sparse)
print("equal")
"""
    assert registered(code)[-1] == "equal"


def test_quantised_layers_choose_the_kernels_and_name_what_they_lack(registered):
    code = """
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel, init_fp8_linear_kernel, init_int8_linear_kernel
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8DynamicTokenSym, kFp8Static128BlockSym, kFp8StaticTensorSym
from vllm.scalar_type import scalar_types as types
def kernel(weight, zeros=False, group=128, inputs=256):
    return choose_mp_linear_kernel(MPLinearLayerConfig((inputs, 64), (inputs, 64), weight, torch.bfloat16, group, zeros)).__name__
with set_current_vllm_config(config):
    ours = "NpuWeightOnlyLinearKernel"
    assert {kernel(types.uint4b8), kernel(types.uint8b128, group=-1), kernel(types.uint4, True, 32)} == {ours}
    assert kernel(types.int4, False, 80, 80) == ours  # W4A8 by channel
    for given, said in [((types.uint2b2,), "4 and 8 bits"), ((types.uint4b8, False, 48), "groups of 48"), ((types.uint4b8, False, 128, 192), "192 inputs"), ((types.uint4b8, False, 128, 96), "96 inputs"), ((types.uint4b8, False, -1, 84), "84 inputs are no multiple of 8")]:
        try: kernel(*given)
        except ValueError as error: assert said in str(error), error
        else: raise AssertionError(given)
    int8 = init_int8_linear_kernel(True, False, False, "layer")
    assert type(int8).__name__ == "NpuInt8LinearKernel"
    torch.set_default_dtype(torch.bfloat16)
    for weight, activation in [(kFp8StaticTensorSym, kFp8DynamicTokenSym), (kFp8Static128BlockSym, kFp8Dynamic128Sym)]:
        fp8 = init_fp8_linear_kernel(activation, weight, torch.bfloat16, torch.bfloat16, (256, 256))
        assert type(fp8).__name__ == "NpuFp8LinearKernel"
    for name, ours in [("auto_gptq", "NpuGPTQConfig"), ("auto_awq", "NpuAWQConfig")]:
        assert get_quantization_config(name).__name__ == ours
    for name in ("auto_gptq", "auto_awq", "fp8", "inc", "quark", "mxfp4", "gpt_oss_mxfp4", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"):
        assert torch.float32 in get_quantization_config(name).get_supported_act_dtypes(), name
    gptq = {"bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    assert get_quantization_config("auto_gptq").from_config(gptq).desc_act
    try: get_quantization_config("auto_gptq").from_config({**gptq, "dynamic": {"+:.*down.*": {"desc_act": False}}})
    except ValueError as error: assert "one desc_act" in str(error)
    else: raise AssertionError
    listed = {**gptq, "desc_act": False, "modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"]]}
    listed = get_quantization_config("auto_gptq").from_config(listed)
    listed.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    method = lambda name: type(listed.get_quant_method(layer, f"layers.0.mlp.{name}")).__name__
    assert method("up_proj") == method("gate_up_proj") == method("up_proj.0") == "NpuGPTQLinearMethod"
    assert method("up_proj_adapters.0.A") == method("down_proj") == "UnquantizedLinearMethod"
    rules = {r".*\\.(gate|up)_proj": {"group_size": 32}, r".*\\.k_proj": {"bits": 8}}
    ruled = get_quantization_config("auto_gptq").from_config({**gptq, "group_size": -1, "dynamic": rules})
    ruled.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    said = lambda name: ruled.get_quant_method(layer, f"layers.0.{name}").quant_config
    assert [(said(n).group_size, said(n).desc_act) for n in ("gate_up_proj", "down_proj")] == [(32, True), (-1, False)]
    try: said("qkv_proj")
    except NotImplementedError as error: assert "different bits or groups" in str(error)
    else: raise AssertionError
    from npu_ops.layers.quantization.experts import Integers, QuantizedExperts
    from types import SimpleNamespace
    cut = Integers(torch.zeros(64, 48, dtype=torch.uint8), torch.ones(64, 1))
    try: QuantizedExperts._integers(None, SimpleNamespace(local_num_experts=1), 4, 32, lambda _: cut, 1)
    except NotImplementedError as error: assert "48 inputs of an expert are no whole number of groups of 32" in str(error)
    else: raise AssertionError
print("chosen")
"""
    assert registered(code)[-1] == "chosen"


def test_scales_of_fp8_blocks_across_the_parts_of_a_layer_are_refused(registered):
    """vLLM would load them, where the parts' last blocks are more than half, and multiply rows by their neighbours'."""
    code = """
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from types import SimpleNamespace
import tempfile
said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
with set_current_vllm_config(config), tempfile.TemporaryDirectory() as place:
    init_distributed_environment(1, 0, f"file://{place}/store", 0, "gloo")
    initialize_model_parallel()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False)
    fp8 = get_quantization_config("fp8").from_config(said)
    def layer(*parts):
        return MergedColumnParallelLinear(256, list(parts), bias=False, quant_config=fp8, prefix="gate_up_proj", disable_tp=True)
    def load(layer, *part, rows=2):
        scales = layer.weight_scale_inv
        scales.weight_loader(scales, torch.full((rows, 4), 3.0), *part)
        return scales.data
    assert (load(layer(128, 112), 1)[2:] == 3).all()  # a last block may be cut
    assert (load(layer(112, 112), rows=4) == 3).all()  # of a matrix that is one in the checkpoint
    for part in (0, 1):
        try: load(layer(112, 112), part)
        except NotImplementedError as error: assert "gate_up_proj has parts of 112, 112 rows" in str(error), error
        else: raise AssertionError(part)
    cut = layer(112, 112)
    cut.weight.weight_loader(cut.weight, torch.ones(112, 256).to(torch.float8_e4m3fn), 1)
    assert (cut.weight.data[112:].float() == 1).all()
print("refused")
"""
    assert registered(code)[-1] == "refused"


def test_fp8_weights_become_panels_where_nothing_else_reads_them(registered):
    code = """
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8DynamicTokenSym, kFp8Static128BlockSym, kFp8StaticTensorSym
from npu_ops import native
from npu_ops.definitions.fp8_linear import fp8_linear
torch.manual_seed(0)
faster, k = native.reads_fp8_panels(), 256
x = torch.randn(5, k).bfloat16()

def check(prefix, n, blocks, packed, dtype=torch.bfloat16):
    weight, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(-(-n // 128), 2) if blocks else torch.rand(1)
    keys = (kFp8Dynamic128Sym, kFp8Static128BlockSym) if blocks else (kFp8DynamicTokenSym, kFp8StaticTensorSym)
    kernel = init_fp8_linear_kernel(*keys, dtype, dtype, (n, k))
    layer = torch.nn.Module()
    layer.prefix, layer.logical_widths = prefix, [n]
    layer.weight = torch.nn.Parameter(weight if blocks else weight.t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    assert (layer.weight.dim() == 3) == (packed and faster), (prefix, n, blocks, layer.weight.shape)
    given = (scale, None, None, 128, 128, 128) if blocks else (scale, None, None, k, n, k)
    expected = fp8_linear.reference(x.to(dtype), weight, *given)
    torch.testing.assert_close(kernel.apply_weights(layer, x.to(dtype)), expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item())

with set_current_vllm_config(config):
    for blocks in (False, True):
        check("layers.0.mlp.down_proj", 96, blocks, packed=True)
        check("layers.0.self_attn.kv_b_proj", 96, blocks, packed=False)
        check("layers.0.mlp.down_proj", 96, blocks, packed=False, dtype=torch.float16)
        check("layers.0.mlp.down_proj", 100, blocks, packed=False)
    if native.available():
        native.set_batch_invariant(on=True)
        check("layers.0.mlp.down_proj", 96, True, packed=True)
        check("layers.0.mlp.down_proj", 96, False, packed=False)
print("passed")
"""
    assert registered(code)[-1] == "passed"


def test_linear_layers_swap_only_the_unquantized_method(registered):
    code = """
import os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from vllm.distributed import init_distributed_environment, initialize_model_parallel
import tempfile
from vllm.model_executor.layers.linear import *
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
near = lambda a, b: torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
with set_current_vllm_config(config), torch.inference_mode():
    init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")
    initialize_model_parallel()
    layers = [
        ReplicatedLinear(16, 24, bias=False), ColumnParallelLinear(16, 24, bias=True), MergedColumnParallelLinear(16, [24, 8]),
        QKVParallelLinear(16, 8, 4, 2), RowParallelLinear(16, 24, bias=True),
    ]
    for layer in layers:
        assert type(layer.quant_method).__name__ == "NpuLinearMethod", type(layer)
        assert any(type(layer).__mro__[2] is base for base in (ReplicatedLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear))
        for p in layer.parameters(): p.data.normal_()
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(3, 16)
        near(layer(x)[0], torch.nn.functional.linear(x, layer.weight.data, None if layer.bias is None else layer.bias.data))
    layer = layers[0]
    layer.weight.data.copy_(torch.ones_like(layer.weight.data))   # reload in place
    near(layer(x)[0], x.sum(-1, keepdim=True).expand(-1, 24))
    layer.weight.data = torch.zeros_like(layer.weight.data)       # reload into other memory
    layer.quant_method.process_weights_after_loading(layer)
    assert not layer(x)[0].any()
    class Quantized(UnquantizedLinearMethod): pass
    import npu_ops.layers.linear
    class Base:
        def __init__(self): self.quant_method = Quantized()
    class Layer(npu_ops.layers.linear.NpuLinear, Base): pass
    assert type(Layer().quant_method) is Quantized
    embedding = VocabParallelEmbedding(70, 16)
    head = ParallelLMHead(70, 16)
    embedding.weight.data.normal_()
    head = head.tie_weights(embedding)
    ids = torch.tensor([3, 69])
    near(embedding(ids), embedding.weight.data[ids])
    near(head.quant_method.apply(head, x), x @ embedding.weight.data.t())
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
print("swapped")
"""
    assert registered(code)[-1] == "swapped"


@pytest.mark.parametrize("by_name", [True, False])
def test_a_tied_head_of_8_bits_holds_its_codes_once(registered, by_name):
    """With the embedding, where the model's configuration says that they are tied; else the head has them."""
    code = f"""
import os, tempfile
from types import SimpleNamespace
os.environ["NPU_HEAD_BITS"] = "8"
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
import npu_ops.layers.embedding as layers
layers.get_current_vllm_config_or_none = lambda: SimpleNamespace(
    model_config=SimpleNamespace(
        runner_type="generate", hf_text_config=SimpleNamespace(tie_word_embeddings={by_name})
    )
)
with set_current_vllm_config(config), torch.inference_mode():
    init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")
    initialize_model_parallel()
    embedding, head = VocabParallelEmbedding(128, 64), ParallelLMHead(128, 64)
    head = head.tie_weights(embedding)
    for scale in (1.0, 3.0):  # the second time as a reload does
        embedding.weight.data.normal_(std=scale)
        for layer in (head, embedding):
            layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(3, 64)
        said, exact = head.quant_method.apply(head, x), x @ embedding.weight.data.t()
        assert 0 < (said - exact).norm() < exact.norm() / 50
    print([sorted(dict(layer.named_buffers())) == sorted(layers.HEAD) for layer in (embedding, head)])
"""
    assert "".join(registered(code)[-2:]) == ("[True,False]" if by_name else "[False,True]")


@pytest.mark.parametrize(
    ("runner", "tied_by_name", "head", "measured"),
    [
        ("generate", False, "its own", ["192x64"]),
        ("generate", True, "tied", ["128x64"]),
        ("generate", True, "none", ["128x64"]),
        ("generate", False, "none", []),
        ("pooling", True, "none", []),
    ],
)
def test_tables_that_are_looked_up_in_alone_are_not_measured(
    registered, tmp_path, runner, tied_by_name, head, measured
):
    code = f"""
import os, tempfile
from types import SimpleNamespace
os.environ["VLLM_CACHE_ROOT"] = {str(tmp_path)!r}
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from npu_ops import choices, other_work
from npu_ops.layers import embedding as layers, linear
other_work._STAT = other_work.Path("no file")  # beside other tests nothing would be measured
layers.get_current_vllm_config_or_none = lambda: SimpleNamespace(
    model_config=SimpleNamespace(
        runner_type={runner!r}, hf_text_config=SimpleNamespace(tie_word_embeddings={tied_by_name})
    )
)
with set_current_vllm_config(config), torch.inference_mode():
    init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")
    initialize_model_parallel()
    made = [VocabParallelEmbedding(128, 64)]
    if {head!r} == "its own":
        made.append(ParallelLMHead(192, 64))
    elif {head!r} == "tied":
        made += [VocabParallelEmbedding(256, 64), ParallelLMHead(128, 64).tie_weights(made[0])]
    linear.warm_up(made, 2)
print("shapes:", *(name.split()[1] for name in choices.shapes(choices.machine(torch.device("cpu")))))
"""
    said = registered(code)
    assert said[said.index("shapes:") + 1 :] == measured


def test_a_folder_without_one_gguf_file_is_refused(registered, tmp_path):
    pytest.importorskip("gguf", reason="checkpoints in GGUF are read by the package gguf")
    code = f"""
from npu_ops.errors import CheckpointError
from npu_ops.layers import gguf_loader
from pathlib import Path
folder = Path({str(tmp_path)!r})
for files, said in (((), "has none"), (("one", "two"), "has one, two"), (("a-00001-of-00002", "a-00002-of-00002"), None)):
    for name in files: (folder / f"{{name}}.gguf").touch()
    try: found = gguf_loader._files(str(folder))
    except CheckpointError as error: assert said in str(error), error
    else: assert said is None and [file.stem for file in found] == list(files)
    for file in folder.iterdir(): file.unlink()
print("said")
"""
    assert registered(code)[-1] == "said"


def test_patch_embeddings_equal_torchs_convolutions(registered):
    code = """
from vllm.model_executor.layers.conv import Conv2dLayer, Conv3dLayer
conv = torch.nn.functional
with set_current_vllm_config(config):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for bias in (True, False):
            image = Conv2dLayer(3, 20, (4, 6), stride=(4, 6), bias=bias, params_dtype=dtype)
            video = Conv3dLayer(3, 20, (2, 4, 4), stride=(2, 4, 4), bias=bias, params_dtype=dtype)
            strided = Conv2dLayer(3, 20, 3, stride=2, padding=1, bias=bias, params_dtype=dtype)
            for layer in (image, video, strided):
                for parameter in layer.parameters():
                    torch.nn.init.normal_(parameter)
            # sizes that are no multiples: what is left over belongs to no patch
            for layer, convolve, shape in (
                (image, conv.conv2d, (2, 3, 9, 19)), (video, conv.conv3d, (2, 3, 4, 9, 8)), (strided, conv.conv2d, (1, 3, 9, 9))
            ):
                print(type(layer).__name__)
                x = torch.randn(shape, dtype=dtype)
                bias_of = None if layer.bias is None else layer.bias.double()
                expected = convolve(x.double(), layer.weight.double(), bias_of, layer.stride, layer.padding)
                torch.testing.assert_close(layer(x).double(), expected, rtol=tolerance, atol=tolerance * 10)
"""
    assert set(registered(code)) == {"NpuConv2dLayer", "NpuConv3dLayer"}
