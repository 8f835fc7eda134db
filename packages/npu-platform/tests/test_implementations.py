"""What a model's layers say of themselves, or are found to run."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from npu_platform.implementations import LayerKind, of_model, text


class Hooked:
    def npu_implementation(self) -> str:
        return "vendor::op (int4)"


class Layer(nn.Linear):
    def __init__(self, quant_method: object) -> None:
        super().__init__(2, 2, bias=False, dtype=torch.bfloat16)
        self.quant_method = quant_method


class Scheme(nn.Module):
    """Its method knows nothing; the kernel of its scheme does."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method, self.scheme = SimpleNamespace(), SimpleNamespace(kernel=Hooked())


class Op(nn.Module):
    """As vLLM's CustomOp: which forward it takes is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_oot

    def forward_oot(self) -> None: ...


def test_hooks_come_first_then_methods_then_forwards() -> None:
    plain = SimpleNamespace(kernel=None)
    model = nn.Sequential(Layer(Hooked()), Layer(Hooked()), Layer(plain), Scheme(), Op(), nn.ReLU())
    kinds = of_model(model)
    assert [(kind.layer, kind.count) for kind in kinds] == [("Layer", 2), ("Layer", 1), ("Scheme", 1), ("Op", 1)]
    assert [kind.dtype for kind in kinds] == ["bfloat16", "bfloat16", "", ""]
    assert kinds[0].implementation == "vendor::op (int4)"
    assert kinds[1].implementation == "types: SimpleNamespace"
    assert kinds[2].implementation == "vendor::op (int4)"
    assert kinds[3].implementation.endswith(": Op.forward_oot")


def test_text_has_a_line_a_kind() -> None:
    kinds = [LayerKind("A", "op", "int8", 12), LayerKind("Longer", "other", "", 1)]
    assert list(text(kinds)) == ["  12 x A       op; int8", "   1 x Longer  other"]
