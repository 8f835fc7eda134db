"""The errors that this distribution raises by itself (kernels raise RuntimeError through torch).

NpuOpsError
 +-- ConfigError             an environment variable has a value that cannot be honoured
 +-- CheckpointError         a checkpoint is not there, or not of a kind that is read here
 +-- UnsupportedLayerError   a layer of the model asks for what the kernels cannot do
"""

from __future__ import annotations


class NpuOpsError(Exception):
    """Base of all errors of npu-ops."""


class ConfigError(NpuOpsError, ValueError):
    """An environment variable has a value that cannot be honoured."""


class CheckpointError(NpuOpsError, ValueError):
    """A checkpoint is not there, or not of a kind that is read here."""


class UnsupportedLayerError(NpuOpsError, NotImplementedError):
    """A layer of the model asks for what the kernels cannot do."""
