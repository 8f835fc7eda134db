"""What is said of the runner: why an engine does not run Triton's layers, and ranks that do not have the same one.

Which runner an engine has is in tests/integration/test_runner_choice.py.
"""

from __future__ import annotations

import pytest

from npu_platform import config, runners
from npu_platform.errors import ConfigurationError


@pytest.fixture
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(config, "_why_runner", None)
    for name in ("_NPU_CHOSEN", "TRITON_DEFAULT_BACKEND", "VLLM_USE_V2_MODEL_RUNNER", "NPU_DEVICE", "CXX"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("all_of_them", [[True], [False], [True] * 4, [False] * 4])
def test_ranks_of_one_runner_are_accepted(all_of_them: list[bool]) -> None:
    runners.refuse_several(all_of_them)


def test_ranks_of_both_runners_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="V1 is that of 1, 3: .* on every host, 0 for V1"):
        runners.refuse_several([True, False, True, False])


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        (
            {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            "VLLM_USE_V2_MODEL_RUNNER=0 leaves them out: set TRITON_DEFAULT_BACKEND=npu",
        ),
        ({"TRITON_DEFAULT_BACKEND": "nvidia"}, "TRITON_DEFAULT_BACKEND=nvidia leaves them out: set TRITON_DEFAULT"),
        (
            {"CXX": "no-such-compiler"},
            "there is no C++ compiler for Triton kernels (apt install g++, or name one in CXX)",
        ),
        ({"NPU_DEVICE": "/a/driver.so"}, "compiled for the host, not for this device (TRITON_DEFAULT_BACKEND=npu runs"),
    ],
)
def test_why_an_engine_does_not_run_layers_of_triton(
    environ: dict[str, str], why: str, nothing_chosen: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        nothing_chosen.setenv(name, value)
    runners.begin_choice()
    assert not config.chose_v2_runner()
    assert not config.is_runner_open()
    assert why in str(runners.without_kernels())
    assert why.partition(" leaves")[0] in config.why_this_runner()


def test_with_nothing_said_the_choice_is_open_until_a_configuration_is_there(
    nothing_chosen: pytest.MonkeyPatch,
) -> None:
    runners.begin_choice()
    assert config.is_runner_open()
