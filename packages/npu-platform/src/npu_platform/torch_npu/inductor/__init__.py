"""``torch.compile`` with Inductor on npu: fused C++, as for the CPU, that runs as kernels of the device.

Inductor asks the device's module for ``Scheduling`` when it first compiles; ``torch.npu`` imports this package then,
and not before, for Inductor takes seconds to import. The import registers all that Inductor needs.
"""

from __future__ import annotations

from .registration import register
from .scheduling import NpuScheduling as Scheduling

__all__ = ["Scheduling"]

register()
