"""Operators that were once wrong on npu, each as the conformance suite found it."""

from __future__ import annotations

import pytest
import torch

DEVICE = "npu"


def test_out_argument_on_the_host_is_refused_even_if_it_is_one_value() -> None:
    one = torch.tensor(2.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        torch.mul(one, one, out=torch.empty(()))


def test_lazy_conjugate_survives_a_copy_to_another_device(run_python) -> None:
    program = """
import torch
x = torch.tensor([1 + 2j, 3 - 4j], device="npu:0")
print(x.conj().to("npu:1").tolist() == [1 - 2j, 3 + 4j], x.imag.neg().to("npu:1").tolist())
print(torch._neg_view(x.imag).to("npu:1").tolist())
"""
    done = run_python(program, NPU_SIMULATOR_DEVICES="2")
    assert done.stdout.split("\n") == ["True [-2.0, 4.0]", "[-2.0, 4.0]", ""], done.stderr


def test_dropout_draws_from_the_devices_generator() -> None:
    x = torch.ones(64, device=DEVICE)
    torch.npu.manual_seed(5)
    first, mask = torch.native_dropout(x, 0.5, True)
    torch.npu.manual_seed(5)
    second, _ = torch.native_dropout(x, 0.5, True)
    assert torch.equal(first, second)
    assert torch.equal(first, mask * 2.0)
    kept, mask = torch.native_dropout(x, 0.5, False)
    assert torch.equal(kept, x)
    assert mask.all()
