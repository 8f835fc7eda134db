"""Owns what Triton's runtime asks of a device: whether it is there, its current one, its properties, its launches."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class NPUDriver(DriverBase):
    """The software NPU behind Triton; upstream interface: ``triton.backends.driver.DriverBase``."""

    def __init__(self) -> None:
        import torch

        from npu_platform import _C
        from npu_platform.triton.launcher import launcher

        super().__init__()
        self._npu = torch.npu
        self.utils = Utilities()
        self.launcher_cls = launcher
        self.get_current_device = _C.triton_current_device
        # The device's number again, by no function of Python's: the launch finds the thread's current stream.
        self.get_current_stream = operator.index
        self.set_current_device = torch.npu.set_device

    @classmethod
    def is_active(cls) -> bool:
        """Say whether kernels would run on npu; asked on every machine, so that nothing is raised."""
        from npu_platform.triton import availability

        return availability.is_active()

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return GPUTarget("npu", "host", 1)

    def get_active_torch_device(self) -> Any:
        """Return the current device of PyTorch."""
        import torch

        return torch.device("npu", self.get_current_device())

    def get_device_interface(self) -> Any:
        """Return ``torch.npu``."""
        return self._npu

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the C++ type of a scalar argument."""
        floats = {"fp16": "float", "bf16": "float", "fp32": "float", "f32": "float", "fp64": "double"}
        return "void*" if ty.startswith("*") else floats.get(ty) or f"int{ty[1:] if ty[1:] != '1' else '8'}_t"

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        """Return how an autotuner times a configuration.

        It takes the first and compiles no other, unless the results are kept (``TRITON_CACHE_AUTOTUNING=1``): a second
        of compilation each is more than a host's kernel wins. vLLM sets that variable when it is imported, for GPUs:
        beside vLLM it says nothing.
        """
        from triton import knobs
        from triton.testing import do_bench

        asked = knobs.autotuning.cache and "vllm" not in sys.modules
        return do_bench if asked else _first_is_best

    def get_empty_cache_for_benchmark(self) -> Any:
        """Return memory that is written between timed launches, as large as a host's caches."""
        import torch

        return torch.empty(32 << 18, dtype=torch.int32, device="npu")

    def clear_cache(self, cache: Any) -> None:
        """Write that memory."""
        cache.zero_()


class Utilities:
    """Properties of a device, and kernels from libraries."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        """Return what Triton and kernels' heuristics ask; memory of a program is as large as they like."""
        import torch

        threads = torch.npu.get_device_properties(device).multi_processor_count
        return {
            "max_shared_mem": 1 << 30,
            "max_num_regs": 1 << 16,
            "multiprocessor_count": threads,
            "warpSize": 1,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }

    @staticmethod
    def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, int, int, int, int]:
        """Load a library; return it, its entry, and how many registers, spills and threads it has: no limit."""
        from npu_platform.triton.launcher import entry_of

        del name, shared, device
        library, entry = entry_of(kernel)
        return library, entry, 0, 0, 1 << 30


def _first_is_best(
    _kernel_call: Callable[[], object], quantiles: Sequence[float] = (0.5,), **_options: Any
) -> list[float]:
    """Return the same time for each configuration, so that the first is taken."""
    return [0.0] * len(quantiles)
