"""Owns the Python that calls fused kernels and the device's ops in turn, and allocates what they write."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen.common import DeviceOpOverrides
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen


class NpuDeviceOpOverrides(DeviceOpOverrides):
    """The Python, in generated code, that makes a device current and waits for it."""

    def import_get_raw_stream_as(self, name: str) -> str:
        """Define ``name(device)``, the id of the current stream."""
        return dedent(f"""
            def {name}(device):
                return torch.npu.current_stream(device).stream_id
        """)

    def set_device(self, device_idx: int) -> str:
        """Make the device current."""
        return f"torch.npu.set_device({device_idx})"

    def synchronize(self) -> str:
        """Wait for the device."""
        return "torch.npu.synchronize()"

    def device_guard(self, device_idx: int) -> str:
        """Make the device current within a context."""
        return f"torch.npu.device({device_idx})"


class _Calls(PythonWrapperCodegen):
    """What is generated differently from the CPU's: calls of kernels, allocations."""

    def make_allocation(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        shape: Any,
        stride: Any,
        allocation_shape: Any = None,
        is_pinned: bool = False,
    ) -> str:
        """Return the line that allocates a buffer: on its own device, which need not be the current one."""
        if device.type != "npu":
            return super().make_allocation(name, device, dtype, shape, stride, allocation_shape, is_pinned)
        sizes = self.codegen_python_shape_tuple(shape)
        strides = self.codegen_python_shape_tuple(stride)
        allocated = sizes if allocation_shape is None else self.codegen_python_shape_tuple(allocation_shape)
        view = "" if allocated == sizes else f".as_strided({sizes}, {strides})"
        return f"{name} = empty_strided_npu({allocated}, {strides}, {dtype}, {device.index or 0}){view}"

    def _generate_kernel_call_helper(
        self, kernel_name: str, call_args: Any, *, device: Any = None, **rest: Any
    ) -> None:
        # Inductor knows calls with a stream, for cuda, and without, for cpu; streams are the launch's matter.
        del device
        super()._generate_kernel_call_helper(kernel_name, call_args, device=torch.device("cpu"), **rest)


class NpuWrapperCodegen(_Calls):
    """The module that a compiled graph becomes.

    Raises:
        NotImplementedError: the graph is to be replayed by Inductor (``mode="reduce-overhead"``, ``"max-autotune"``).
    """

    def __init__(self) -> None:
        if config.triton.cudagraphs:
            msg = (
                "torch.compile on npu does not capture graphs by itself (mode='reduce-overhead' or 'max-autotune', "
                "triton.cudagraphs): compile without the mode and pass the compiled function to "
                "torch.npu.make_graphed_callables, or call it inside torch.npu.graph"
            )
            raise NotImplementedError(msg)
        super().__init__()

    @staticmethod
    def create(
        is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None
    ) -> PythonWrapperCodegen:
        """Return the wrapper of a graph, or of a graph within a graph."""
        if is_subgraph:
            return NpuSubgraphWrapperCodegen(subgraph_name, parent_wrapper, partition_signatures)
        return NpuWrapperCodegen()

    def write_header(self) -> None:
        """Write the imports, and where the launch table is in this process."""
        super().write_header()
        self.header.splice("""
            npu_launch_table = torch.ops.npu.launch_table()
            from npu_platform.torch_npu.inductor.runtime import empty_strided_npu, host_tensor
        """)


class NpuSubgraphWrapperCodegen(_Calls, SubgraphPythonWrapperCodegen):
    """A graph within a graph."""


class RefusedWrapperCodegen(PythonWrapperCodegen):
    """Refuses the other forms that Inductor can give to a compiled graph.

    Raises:
        NotImplementedError: always.
    """

    @staticmethod
    def create(*_graph: Any, **_options: Any) -> PythonWrapperCodegen:
        """Refuse."""
        msg = (
            "torch.compile on npu generates Python that calls C++ kernels: leave cpp_wrapper and fx_wrapper of "
            "torch._inductor.config off; AOTInductor is not supported"
        )
        raise NotImplementedError(msg)
