"""Owns what Inductor is told: who generates for npu, how its devices are switched, what compiled code depends on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch._inductor.codegen.common import register_backend_for_device, register_device_op_overrides
from torch._inductor.custom_graph_pass import CustomGraphModulePass, get_hash_for_files

from npu_platform.torch_npu import fake_convolutions

from .interface import register_interface
from .scheduling import NpuScheduling
from .wrapper import NpuDeviceOpOverrides, NpuWrapperCodegen, RefusedWrapperCodegen

if TYPE_CHECKING:
    from torch.fx import GraphModule


class GeneratorVersion(CustomGraphModulePass):
    """Changes no graph; its id makes Inductor's cache on disk forget what another version of this package generated."""

    def __call__(self, gm: GraphModule) -> None:
        """Leave the graph as it is."""

    def uuid(self) -> bytes:
        """Return a hash of the sources that generate, and of those that say which layout an op's result has."""
        sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(fake_convolutions.__file__)]
        return get_hash_for_files(tuple(map(str, sources)))


def register() -> None:
    """Register npu with Dynamo and Inductor."""
    register_interface()
    register_device_op_overrides("npu", NpuDeviceOpOverrides())
    register_backend_for_device(
        "npu",
        NpuScheduling,
        NpuWrapperCodegen,
        device_cpp_wrapper_codegen=RefusedWrapperCodegen,
        device_fx_wrapper_codegen=RefusedWrapperCodegen,
        device_custom_pass=GeneratorVersion(),
    )
