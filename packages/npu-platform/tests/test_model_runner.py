"""What the runner adds to vLLM's, apart from an engine."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from npu_platform.model_runner import NPUModelRunner


def test_who_drafts_is_among_the_models() -> None:
    target, head = nn.Linear(1, 1), nn.Linear(1, 1)
    drafters = [{"drafter": SimpleNamespace(model=head)}, {"drafter": SimpleNamespace()}, {}]
    found = [NPUModelRunner.models(SimpleNamespace(get_model=lambda: target, **one)) for one in drafters]
    assert found == [[target, head], [target], [target]]
