"""The exceptions that npu-platform raises.

NPUPlatformError (Exception)
    ConfigurationError (also ValueError)      a setting has a value that the rules forbid
    UnsupportedFeatureError (also ValueError) a feature of vLLM that the npu device cannot do yet
    KernelCompilationError (also RuntimeError) a Triton kernel could not be compiled
    KernelLaunchError (also RuntimeError)     a Triton kernel could not be launched, or failed
        HostTensorError (also ValueError)     a Triton kernel got a tensor that its device cannot read
"""

from __future__ import annotations


class NPUPlatformError(Exception):
    """Base of everything that npu-platform raises on purpose."""


class ConfigurationError(NPUPlatformError, ValueError):
    """A setting has a value that the rules forbid; the message names setting, value and remedy."""


class UnsupportedFeatureError(NPUPlatformError, ValueError):
    """vLLM was asked for something that the npu device cannot do; the message names the way out."""


class KernelCompilationError(NPUPlatformError, RuntimeError):
    """A Triton kernel could not be compiled: there is no C++ compiler, or it failed."""


class KernelLaunchError(NPUPlatformError, RuntimeError):
    """A Triton kernel could not be launched, or one of its programs failed."""


class HostTensorError(KernelLaunchError, ValueError):
    """A Triton kernel got a tensor of the host that is not pinned: a ValueError in Triton, too."""
