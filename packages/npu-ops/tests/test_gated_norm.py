from __future__ import annotations

import pytest
import torch

from npu_ops.op import OPS


@pytest.mark.parametrize(("width", "group"), [(64, 64), (96, 32), (33, 11), (2048, 256)])
@pytest.mark.parametrize(("norm_first", "sigmoid"), [(True, False), (False, False), (True, True)])
def test_against_the_reference(ops, isa, device, dtype, close, width, group, norm_first, sigmoid):
    x, gate, weight = torch.randn(5, width).to(dtype), torch.randn(5, width).to(dtype), torch.randn(width)
    weight = weight.to(dtype) if sigmoid else weight
    args = (x, gate, weight)
    actual = ops.gated_rms_norm(*(v.to(device) for v in args), 1e-5, group, norm_first, sigmoid)
    reference = OPS["gated_rms_norm"].reference(*(v.double() for v in args), 1e-5, group, norm_first, sigmoid)
    close(actual, reference, units=1.01)


def test_strides_of_each_kind(ops):
    mixed = torch.randn(3, 4, 40)
    x, gate, weight = mixed[..., 8:24], torch.randn(3, 4, 16), torch.randn(16)
    expected = OPS["gated_rms_norm"].reference(x, gate, weight, 1e-5, 16, True, False)
    for a, b in ((x, gate), (x, gate.transpose(0, 1).contiguous().transpose(0, 1)), (x.contiguous(), gate)):
        torch.testing.assert_close(ops.gated_rms_norm(a, b, weight, 1e-5, 16, True, False), expected)
    assert ops.gated_rms_norm(x[:0], gate[:0], weight, 1e-5, 16, True, False).shape == (0, 4, 16)
