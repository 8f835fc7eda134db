"""`npu info` and what it counts as an implementation."""

from __future__ import annotations

import json

import pytest
import torch

from npu_platform import cli, info


def test_info_shows_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["devices"]) == torch.npu.device_count()
    first = report["devices"][0]
    assert first["index"] == 0
    assert 0 < first["memory_free"] <= first["memory_total"]
    sets = {each["name"]: each for each in report["instruction_sets"]}
    assert sets["scalar"] == {
        "name": "scalar",
        "instructions": "",
        "timed_on": "AMD Zen 3",
        "here": sets["scalar"]["here"],
    }
    assert [each["here"] for each in sets.values()].count("in use") == 1
    assert cli.main(["info"]) == 0
    assert "npu:0" in capsys.readouterr().out


def test_registered_ops_tell_native_kernels_from_others() -> None:
    library = torch.library.Library("npu_ops", "FRAGMENT")
    library.define("info_probe(Tensor x) -> Tensor")
    library.impl("info_probe", lambda x: x.clone(), "CPU")
    (probe,) = [op for op in info.registered_ops() if op.name == "npu_ops::info_probe"]
    assert probe == info.Op("npu_ops::info_probe", "CPU kernel on aliases of device memory", "native kernel")
    library.impl("info_probe", lambda x: x.clone(), "PrivateUse1")
    (probe,) = [op for op in info.registered_ops() if op.name == "npu_ops::info_probe"]
    assert probe.npu == "native kernel"


def test_unknown_command_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["verify"])
    assert exit_.value.code == 2
