"""The backend's name in vLLM's registry, and the choice of a backend for one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_platform.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

BACKEND_NAME = "NPU_PAGED"
BACKEND_CLASS = "npu_platform.attention.backend.NPUPagedBackend"
MLA_BACKEND_NAME = "NPU_MLA"
MLA_BACKEND_CLASS = "npu_platform.attention.mla.NPUMLABackend"


def register_attention_backend() -> None:
    """Add ``NPU_PAGED`` and ``NPU_MLA`` to vLLM's attention registry, once per process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in ((BACKEND_NAME, BACKEND_CLASS), (MLA_BACKEND_NAME, MLA_BACKEND_CLASS)):
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)


def backend_for(use_mla: bool) -> tuple[str, type[AttentionBackend]]:
    """Return the name and the class of a model's attention backend: ours, or what took its place in vLLM's registry.

    Raises UnsupportedFeatureError for a class that is not a subclass of ours, on whose metadata graphs and drafts rely.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_attention_backend()
    name, path = (MLA_BACKEND_NAME, MLA_BACKEND_CLASS) if use_mla else (BACKEND_NAME, BACKEND_CLASS)
    backend = AttentionBackendEnum[name].get_class()
    if not issubclass(backend, resolve_obj_by_qualname(path)):
        msg = f"The attention backend registered as {name} must be a subclass of {path}, not {backend}: derive it."
        raise UnsupportedFeatureError(msg)
    return name, backend


def select_backend(selected: Any, selector: AttentionSelectorConfig) -> str:
    """Return the dotted name of the backend for a layer.

    `selected` is the member that ``--attention-backend`` names, or None. Raises UnsupportedFeatureError naming
    everything in `selector` that the backend cannot do.
    """
    name, backend = backend_for(selector.use_mla)
    if selected is not None and selected.name != name:
        remedy = f"leave out --attention-backend or pass {name}"
        msg = f"attention backend {selected.name} does not run on npu: {remedy}."
        raise UnsupportedFeatureError(msg)
    reasons = backend.validate_configuration(device_capability=None, **selector._asdict())
    if reasons:
        remedy = "leave out the setting that asks for it, such as --kv-cache-dtype, or serve another model"
        msg = f"{name} cannot run this layer ({'; '.join(reasons)}): {remedy}. The layer: {selector}."
        raise UnsupportedFeatureError(msg)
    return f"{backend.__module__}.{backend.__qualname__}"
