"""Torch's products of npu tensors in batch-invariant mode, in a process of their own: they are registered for good."""

from __future__ import annotations

from tests.support.vllm_process import run_program

PROGRAM = """
import torch
import npu_ops, npu_platform.batch_invariance
from vllm.plugins import load_general_plugins

load_general_plugins()
npu_ops.native.set_batch_invariant(on=True)
npu_platform.batch_invariance.register_products()
torch.manual_seed(0)

def check(product, *shapes, dtype):
    a, b, added = (torch.randn(shape, dtype=dtype) for shape in shapes)
    on_npu = [t.to("npu") for t in (a, b, added)]
    for b_npu in (on_npu[1], on_npu[1].transpose(-1, -2).contiguous().transpose(-1, -2)):
        out = product(on_npu[0], b_npu, on_npu[2])
        tolerance = torch.finfo(dtype).resolution
        torch.testing.assert_close(
            out.cpu().double(), product(a.double(), b.double(), added.double()),
            rtol=8 * tolerance, atol=8 * tolerance * a.shape[-1] ** 0.5,
        )
        for rows in (1, 2, 7, 20, 41):
            assert torch.equal(product(on_npu[0][..., :rows, :], b_npu, on_npu[2][..., :rows, :]), out[..., :rows, :])

PRODUCTS = {
    "mm": (lambda a, b, _: torch.mm(a, b), ()),
    "addmm": (lambda a, b, added: torch.addmm(added, a, b, beta=0.5, alpha=2), ()),
    "bmm": (lambda a, b, _: torch.bmm(a, b), (3,)),
    "baddbmm": (lambda a, b, added: torch.baddbmm(added, a, b), (3,)),
    "linear": (lambda a, b, _: torch.nn.functional.linear(a, b.transpose(-1, -2)), ()),
    "matmul": (lambda a, b, _: a @ b, (2, 3)),
    "out": (lambda a, b, _: torch.bmm(a, b, out=a.new_empty(3, b.shape[2], a.shape[1]).transpose(1, 2)), (3,)),
}
for name, (product, batch) in PRODUCTS.items():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(product, (*batch, 41, 1100), (*batch, 1100, 36), (*batch, 41, 36), dtype=dtype)
whole = torch.arange(6.0, dtype=torch.float64, device="npu").view(2, 3)
assert torch.equal((whole @ whole.T).cpu(), whole.cpu() @ whole.cpu().T)
nan = torch.full((2, 2), float("nan"), device="npu")
assert not torch.addmm(nan, nan.new_ones(2, 2), nan.new_ones(2, 2), beta=0).isnan().any()
print("SAME")
"""


def test_a_row_is_the_same_in_any_company() -> None:
    done = run_program(PROGRAM)
    assert done.stdout.endswith("SAME\n"), done.stderr[-3000:]
