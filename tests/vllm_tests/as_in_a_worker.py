"""A plugin of pytest for vLLM's own tests: what a worker of npu does when it starts, done before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load vLLM's general plugins and its kernels' bodies, and let the V2 runner make buffers."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from npu_platform import compat

    load_general_plugins()
    current_platform.register_triton_kernel_overrides()
    buffers = compat.buffers_of_npu()
    buffers.__enter__()
    config.add_cleanup(lambda: buffers.__exit__(None, None, None))
