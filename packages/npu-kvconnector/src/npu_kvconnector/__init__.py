"""The entry point of the KV connector plugin: ``register`` tells vLLM the connectors' names, and nothing else."""

from __future__ import annotations

import functools
import logging

CONNECTOR = "NPUOffloadConnector"
"""What users write as ``kv_connector`` in ``--kv-transfer-config``."""

TRANSFER_CONNECTOR = "NPUNixlConnector"
"""The same, for disaggregated prefill."""

_MODULES = {CONNECTOR: "npu_kvconnector.connector", TRANSFER_CONNECTOR: "npu_kvconnector.p2p.connector"}


@functools.cache
def register() -> None:
    """Register the connectors with vLLM's factory; their modules are imported when a configuration names them.

    vLLM calls this in each of its processes. It never raises: a process that does not use the connectors must not
    notice them.
    """
    logger = logging.getLogger("vllm.npu_kvconnector")
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        register_connector = KVConnectorFactory.register_connector
    except (ImportError, AttributeError) as error:
        logger.warning("%s is not available: this vLLM has no such connector factory (%s)", CONNECTOR, error)
        return
    for name, module in _MODULES.items():
        try:
            register_connector(name, module, name)
        except ValueError:
            logger.warning("%s is not available: another plugin has taken its name", name)
