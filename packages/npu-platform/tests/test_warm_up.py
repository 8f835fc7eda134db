"""What layers do once after loading."""

from __future__ import annotations

from torch import nn

from npu_platform.warm_up import warm_up


def test_a_hook_gets_all_layers_that_have_it_and_the_rows() -> None:
    calls = []

    class Method:
        @staticmethod
        def npu_warm_up(layers: list[nn.Module], rows: int) -> None:
            calls.append((layers, rows))

    class Derived(Method):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    one, two, other = model[0], model[1][1], model[2]
    one.quant_method, two.quant_method, other.quant_method = Method(), Derived(), object()  # type: ignore[assignment]
    warm_up(model, 7)
    assert calls == [([one, two], 7)]
