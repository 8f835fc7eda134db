"""Owns the C++ of fused kernels: Inductor's own for the CPU, entered through the device's launch table.

A kernel becomes two functions: ``body``, which is what Inductor generates for the CPU, and an entry, which launches it.
So it counts as a kernel of the device, has a name in the profiler, may touch device memory, and is repeated by graphs.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.codegen.cpp import CppScheduling, KernelGroup
from torch._inductor.utils import Placeholder
from torch._inductor.virtualized import V

# The table of csrc/include/npu_launch.h, as far as kernels need it.
LAUNCH = """
#include <stdexcept>
struct npu_launch_table {
  uint32_t abi;
  int (*launch)(int device, const char* name, void (*run)(void*), void* closure, void (*destroy)(void*));
  void (*parallel_for)(int64_t, int64_t, int64_t, void (*)(void*, int64_t, int64_t), void*);
  int (*num_threads)(void);
  const char* (*last_error)(void);
};
template <class Kernel>
static void npu_launch(int64_t address, int64_t device, const char* name, Kernel kernel) {
  const auto* table = reinterpret_cast<const npu_launch_table*>(address);
  if (table->abi != 1) throw std::runtime_error("this kernel was compiled for another version of npu-platform");
  auto run = [](void* closure) { (*static_cast<Kernel*>(closure))(); };
  auto destroy = [](void* closure) { delete static_cast<Kernel*>(closure); };
  if (table->launch(int(device), name, run, new Kernel(kernel), destroy)) throw std::runtime_error(table->last_error());
}
"""


class NpuKernelArgs(KernelArgs):
    """A kernel's arguments: tensors and sizes, then the address of the launch table and the device's number."""

    device: torch.device

    def cpp_argdefs(self, dtype_to_cpp_type: Any = None) -> tuple[list[str], list[str], list[str]]:
        """Return definitions, call arguments and types, the two of the launch last."""
        definitions, call, types = super().cpp_argdefs(dtype_to_cpp_type)
        return (
            [*definitions, "const int64_t npu_table", "const int64_t npu_device"],
            [*map(_call_argument, call), "npu_launch_table", str(self.device.index or 0)],
            [*types, "const int64_t", "const int64_t"],
        )


def _call_argument(argument: str) -> str:
    buffer = V.graph.try_get_buffer(argument)
    on_host = buffer is not None and buffer.get_device() == torch.device("cpu")
    return f"host_tensor({argument})" if on_host else argument


class NpuKernelGroup(KernelGroup):
    """The loops of one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.args = NpuKernelArgs()

    def finalize_kernel(self, new_kernel: Any, nodes: Any) -> None:
        """Take the loops of ``nodes`` in."""
        self.args.device = nodes[0].get_device()
        super().finalize_kernel(new_kernel, nodes)

    def codegen_group(self, name: str | None = None) -> str:
        """Return the source of the kernel: the launch, Inductor's function as ``body``, the entry."""
        source = super().codegen_group(name)
        if not source:
            return ""
        entry = str(Placeholder.KERNEL_NAME) if name is None else name
        prelude, _, definition = source.partition('extern "C"')
        declaration, _, rest = definition.partition(f"{entry}(")
        definitions, _, _ = self.args.cpp_argdefs()
        names = ", ".join(each.rpartition(" ")[2].lstrip("*") for each in definitions)
        launched = str(Placeholder.DESCRIPTIVE_NAME) if name is None else name
        return (
            f"{prelude}{LAUNCH}static void body({rest}\n"
            f'extern "C"{declaration}{entry}({", ".join(definitions)})\n'
            f'{{\n    npu_launch(npu_table, npu_device, "{launched}", [=] {{ body({names}); }});\n}}\n'
        )


class LoopSizes(tuple[Any, ...]):
    """The sizes of a nest of loops, which no product with another nest's equals.

    Inductor multiplies the two groups of a reduction to find pointwise loops of as many steps, which it then splits in
    two. For the CPU it does not try, since C++ is generated from loops as they are, not from numbers of steps.
    """

    __slots__ = ()

    def __mul__(self, other: object) -> sympy.Expr:  # type: ignore[override]
        """Return -1, the number of steps of no loop."""
        return sympy.Integer(-1)


class NpuScheduling(CppScheduling):
    """Fuses and generates as for the CPU, kernel by kernel a launch."""

    def group_fn(self, sizes: Any) -> tuple[LoopSizes, ...]:
        """Return the sizes of the outer and of the reduction's loops."""
        return tuple(LoopSizes(group) for group in super().group_fn(sizes))

    def codegen_node(self, node: Any) -> None:
        """Generate the loops of a node with the CPU for the current device: Inductor picks the language by it."""
        with V.graph.set_current_device(torch.device("cpu")):
            super().codegen_node(node)

    def reset_kernel_group(self) -> None:
        """Begin a new kernel."""
        self.kernel_group = NpuKernelGroup()
