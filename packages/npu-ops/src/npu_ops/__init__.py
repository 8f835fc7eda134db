"""Custom ops for vLLM on any device called npu: `torch.ops.npu_ops.*` on CPU and npu tensors, references elsewhere.

Importing this package defines the ops and loads the native kernels; it needs torch only. `register()` is the entry
point by which vLLM learns of them.
"""

from __future__ import annotations

from npu_ops import choices, definitions, native

__all__ = ["choices", "definitions", "native", "register"]

native.load()

_registered = False


def register() -> None:
    """Register the ops with vLLM (entry point `vllm.general_plugins: npu_ops`). Idempotent.

    Does nothing when vLLM runs on a platform of its own: the classes would be in the way there.
    """
    global _registered
    from vllm.platforms import current_platform

    if _registered or not current_platform.is_out_of_tree():
        return
    _registered = True
    from npu_ops import layers

    layers.register_all()
