"""Owns what Triton's compiler asks of a backend: options, passes over TTIR, the stages to a library."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from triton import knobs
from triton.backends.compiler import BaseBackend, GPUTarget

from npu_platform.errors import KernelCompilationError, UnsupportedFeatureError

_IGNORED = ("fpsan_homomorphic_casts",)  # of some versions; what they ask for is a GPU's matter


@dataclass(frozen=True)
class NPUOptions:
    """What a launch may ask for. Warps, stages and clusters are accepted: kernels written for GPUs name them."""

    num_warps: int = 1
    num_stages: int = 1
    num_ctas: int = 1
    cluster_dims: tuple[int, ...] = (1, 1, 1)  # Triton 3.5 reads it back as a tuple
    warp_size: int = 1
    maxnreg: int | None = None
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    ir_override: str | None = None
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv", "fp8e4b8", "fp8e5b16")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    extern_libs: Any = None
    debug: bool = False
    backend_name: str = "npu"
    sanitize_overflow: bool = False
    arch: str = "host"
    instrumentation_mode: str = ""

    def hash(self) -> str:
        """Return what tells compiled kernels of other options apart."""
        return hashlib.sha256(repr(sorted(self.__dict__.items(), key=lambda item: item[0])).encode()).hexdigest()


class NPUBackend(BaseBackend):
    """Compiles TTIR to C++ and that to a library; upstream interface: ``triton.backends.compiler.BaseBackend``."""

    binary_ext = "so"
    # That 16 divides an address or a number would make more kernels to compile, and none of them faster.
    supports_native_tensor_specialization = False

    def __init__(self, target: GPUTarget) -> None:
        from npu_platform import _C

        super().__init__(target)
        # Nothing, as for numbers; not by a function of Python's, since Triton asks for each tensor of each launch.
        self.__dict__["get_tensor_specialization"] = _C.triton_no_specialization

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Say whether this backend compiles for a target."""
        return target.backend == "npu"

    def hash(self) -> str:
        """Return what a library depends on beside source and options: generator, compiler, processor."""
        from npu_platform.triton import build

        return f"npu-{build.toolchain()}"

    def parse_options(self, options: dict[str, Any]) -> NPUOptions:
        """Return the options of a launch; those that only GPUs have are accepted, and say nothing here."""
        known = {field.name for field in fields(NPUOptions)}
        parsed = NPUOptions(**{key: value for key, value in options.items() if key in known and value is not None})
        for name in _IGNORED:
            object.__setattr__(parsed, name, options.get(name))
        return parsed

    def pack_metadata(self, metadata: Any) -> tuple[int, int, int]:
        """Return what Triton's hooks are told of a kernel."""
        return (metadata.num_warps, metadata.num_ctas, metadata.shared)

    def get_codegen_implementation(self, options: NPUOptions) -> dict[str, Any]:
        """Return what Triton's frontend asks: products of any size are allowed."""
        del options
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def get_module_map(self) -> dict[str, ModuleType]:
        """Return where ``libdevice`` is; its symbols are those of NVIDIA's."""
        from triton.language.extra.cuda import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, ctx: Any) -> None:
        """Load nothing: TTIR has all."""

    @staticmethod
    def get_int_specialization(arg: int, **kwargs: Any) -> str:
        """Return nothing: a number that 16 divides is a number."""
        del arg, kwargs
        return ""

    @staticmethod
    def parse_attr(desc: str) -> list[Any]:
        """Return nothing for what Triton has found out itself: such kernels share one library in the cache."""
        del desc
        return []

    def add_stages(self, stages: dict[str, Any], options: NPUOptions, language: Any = None) -> None:
        """Name the stages; each is also a text or a file in ``kernel.asm``.

        Raises UnsupportedFeatureError for Gluon, KernelCompilationError where Triton would not keep what comes out.
        """
        if getattr(language, "name", "") == "GLUON":
            msg = (
                "Gluon tells which thread of a GPU has which element, and does not run on npu: write the kernel in "
                "triton.language."
            )
            raise UnsupportedFeatureError(msg)
        if knobs.compilation.store_binary_only:
            msg = (
                "TRITON_STORE_BINARY_ONLY lets Triton keep binaries of NVIDIA's and AMD's GPUs alone, and no kernel of "
                "npu: unset it."
            )
            raise KernelCompilationError(msg)
        stages["ttir"] = _ttir
        stages["cpp"] = _cpp
        stages["so"] = lambda source, metadata: _so(source, metadata, options)


def _ttir(module: Any, _metadata: dict[str, Any]) -> Any:
    from triton._C.libtriton import ir, passes

    manager = ir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    if hasattr(passes.ttir, "add_rewrite_tensor_pointer"):  # block pointers, until Triton 3.8
        passes.ttir.add_rewrite_tensor_pointer(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.ttir.add_triton_licm(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    try:
        manager.run(module, "npu_ttir")
    except TypeError:  # Triton 3.5 takes no name
        manager.run(module)
    return module


def _cpp(module: Any, metadata: dict[str, Any]) -> str:
    from npu_platform.triton.codegen.module import generate

    metadata["shared"] = 0
    metadata["name"] = module.get_entry_func_name()
    return generate(module.str_nodebug())


def _so(source: str | None, metadata: dict[str, Any], options: NPUOptions) -> bytes:
    from npu_platform.triton import build

    if source is None:  # Triton's own reader knows the stages of GPUs
        msg = (
            f"A file is to override {metadata['name']}.cpp (TRITON_KERNEL_OVERRIDE, ir_override), and Triton reads "
            "back no stage of npu but ttir: override the stage ttir."
        )
        raise KernelCompilationError(msg)
    return build.compile_library(source, metadata["name"], fused=options.enable_fp_fusion)
