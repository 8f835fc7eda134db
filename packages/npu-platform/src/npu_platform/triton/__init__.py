"""A backend of Triton for the device ``npu``: kernels become C++ of this host, launched as kernels of the device.

Triton imports :mod:`compiler` and :mod:`driver` of this package whenever it is imported itself, on any machine; so they
import nothing heavy and raise nothing. Upstream interface: ``triton.backends`` (3.5 and later).
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is not None:
    # First: where `compiler` here is imported before it, Triton finds a module that has not defined its backend yet.
    import triton  # noqa: F401
