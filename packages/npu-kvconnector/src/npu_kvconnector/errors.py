"""The exceptions of this distribution.

::

    KVConnectorError
    +-- OptionError (ValueError)      kv_connector_extra_config says something unknown or impossible
    +-- UnsupportedError (ValueError) a deployment that the connector cannot serve exactly
    +-- CapacityError (MemoryError)   the host tier does not fit the host's memory, or holds no chunk
    +-- TransferError (RuntimeError)  a job names pages that do not exist; nothing was copied
    +-- IntegrityError (ValueError)   a stored block is damaged, forged or another's; it counts as a miss
    +-- StoreError (RuntimeError)     a store is down, slow or refuses us; what it holds counts as a miss
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "IntegrityError",
    "KVConnectorError",
    "OptionError",
    "StoreError",
    "TransferError",
    "UnsupportedError",
]


class KVConnectorError(Exception):
    """Base of every error raised on purpose here."""


class OptionError(KVConnectorError, ValueError):
    """An unknown key or a bad value in ``kv_connector_extra_config``."""


class UnsupportedError(KVConnectorError, ValueError):
    """A feature of the deployment that this connector refuses."""


class CapacityError(KVConnectorError, MemoryError):
    """The host tier is too large for the host, or too small for one chunk."""


class TransferError(KVConnectorError, RuntimeError):
    """A transfer job that does not fit the registered caches."""


class IntegrityError(KVConnectorError, ValueError):
    """A stored block that must not be used: it is damaged, forged, or belongs to another key, model or tenant."""


class StoreError(KVConnectorError, RuntimeError):
    """A store outside of this process that does not do what was asked; its message names no credentials."""
