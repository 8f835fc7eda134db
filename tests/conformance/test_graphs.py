"""Every operator captured in a graph and replayed with other inputs gives what eager gives, or is refused by its name.

Which are refused, for all or for some of their samples, is listed in skips.toml, and must be so.
"""

from __future__ import annotations

import itertools
import re
import tomllib
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from tests.support.operators import UNDEFINED, call, moved
from tests.support.parity import compare, see

SAMPLES = 2
REFUSED = tomllib.loads(Path(__file__).with_name("skips.toml").read_text())["refused"]
SEED = 42  # the database's own: it seeds random operators inside the call, which a replay does not repeat
REFUSALS = (
    r"npu: .*\S is not permitted while a graph is captured",
    r"npu: \S+ allocated its result differently on replay",
)


class TestGraphs(TestCase):
    @ops([op for op in op_db if op.name not in UNDEFINED], dtypes=OpDTypes.any_one)
    def test_replay_with_other_inputs(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        pairs = zip(drawn(op, device, dtype, 1), drawn(op, device, dtype, 2), strict=False)
        replayed = [replays(op, captured, other) for captured, other in itertools.islice(pairs, SAMPLES)]
        seen = [outcome for outcome in replayed if outcome is not None]
        refused = "all" if not any(seen) else "some" if not all(seen) else None
        if not seen:
            self.skipTest("nothing to observe: no sample that runs without a graph")
        assert refused == REFUSED.get(op.full_name), (
            f"{refused or 'none'} of the samples of {op.full_name} are refused in a graph; skips.toml says otherwise"
        )
        if refused == "all":
            self.skipTest("refused in a graph, as listed")


def drawn(op: OpInfo, device: str, dtype: torch.dtype, seed: int) -> Iterator[SampleInput]:
    """Return samples whose values come from a seed."""
    torch.manual_seed(seed)
    return moved(list(itertools.islice(op.sample_inputs("cpu", dtype, set_seed=False), SAMPLES)), device, op)


def replays(op: OpInfo, sample: SampleInput, other: SampleInput) -> bool | None:
    """Compare a replay on other values with eager on them; False where the operator is refused, None where eager is."""
    try:
        call(op, sample)
    except unittest.SkipTest:
        raise
    except Exception:  # noqa: BLE001 - not an operator of this device or sample: test_operators judges that
        return None
    graph = torch.npu.NPUGraph()
    torch.manual_seed(SEED)
    try:
        result = captured(graph, op, sample)
        overwrite(sample, other)
        torch.manual_seed(SEED)
        graph.replay()
    except RuntimeError as error:
        if any(re.search(refusal, str(error)) for refusal in REFUSALS):
            return False
        raise
    torch.manual_seed(SEED)
    compare([see(result)], [see(call(op, sample))])
    return True


def captured(graph: torch.npu.NPUGraph, op: OpInfo, sample: SampleInput) -> Any:
    """Call an operator under capture. Not by `with torch.npu.graph`, which collects garbage: seconds among these objects."""
    graph.capture_begin()
    try:
        return call(op, sample)
    finally:
        graph.capture_end()


def overwrite(sample: SampleInput, other: SampleInput) -> None:
    """Write the values of another sample into the tensors of this one."""
    pairs = zip(tensors(sample), tensors(other), strict=True)
    for target, source in pairs:
        if target.shape == source.shape and target.dtype == source.dtype and target.device.type == "npu":
            target.copy_(source)


def tensors(sample: SampleInput) -> list[Tensor]:
    """Return the tensors of a sample."""
    return [leaf for leaf in tree_leaves([sample.input, sample.args, sample.kwargs]) if isinstance(leaf, Tensor)]


instantiate_device_type_tests(TestGraphs, globals(), only_for="npu")
