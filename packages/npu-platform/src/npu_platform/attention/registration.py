"""The backend's name in vLLM's registry, and the choice of a backend for one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_platform.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.v1.attention.selector import AttentionSelectorConfig

BACKEND_NAME = "NPU_PAGED"
BACKEND_CLASS = "npu_platform.attention.backend.NPUPagedBackend"


def register_attention_backend() -> None:
    """Add ``NPU_PAGED`` to vLLM's attention registry, once per process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_CLASS)


def select_backend(selected: Any, selector: AttentionSelectorConfig) -> str:
    """Return the dotted name of the backend for a layer.

    `selected` is the member that ``--attention-backend`` names, or None. Raises UnsupportedFeatureError naming
    everything in `selector` that the backend cannot do.
    """
    from npu_platform.attention.backend import NPUPagedBackend

    register_attention_backend()
    if selected is not None and selected.name != BACKEND_NAME:
        remedy = f"leave out --attention-backend or pass {BACKEND_NAME}"
        msg = f"attention backend {selected.name} does not run on npu: {remedy}."
        raise UnsupportedFeatureError(msg)
    reasons = NPUPagedBackend.validate_configuration(device_capability=None, **selector._asdict())
    if reasons:
        msg = f"{BACKEND_NAME} cannot run this layer: {'; '.join(reasons)} ({selector})."
        raise UnsupportedFeatureError(msg)
    return BACKEND_CLASS
