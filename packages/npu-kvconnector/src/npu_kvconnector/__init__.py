"""The entry point of the KV connector plugin: ``register`` tells vLLM the connector's name, and nothing else."""

from __future__ import annotations

import functools
import logging

CONNECTOR = "NPUOffloadConnector"
"""What users write as ``kv_connector`` in ``--kv-transfer-config``."""


@functools.cache
def register() -> None:
    """Register the connector with vLLM's factory; its module is imported when a configuration names it.

    vLLM calls this in each of its processes. It never raises: a process that does not use the connector must not
    notice it.
    """
    logger = logging.getLogger("vllm.npu_kvconnector")
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(CONNECTOR, "npu_kvconnector.connector", CONNECTOR)
    except (ImportError, AttributeError) as error:
        logger.warning("%s is not available: this vLLM has no such connector factory (%s)", CONNECTOR, error)
    except ValueError:
        logger.warning("%s is not available: another plugin has taken its name", CONNECTOR)
