"""The entry point of the platform plugin: a dotted name, or None."""

from __future__ import annotations

import logging

_said = False


def register() -> str | None:
    """Return the platform's dotted class name, or None when this process should not be an npu process.

    vLLM calls this in every process, twice when the platform wins, and swallows what it raises: so it never
    raises, and what it decided is kept in :func:`npu_platform.activation.decide` for ``npu doctor``.
    """
    global _said
    import gc

    from npu_platform import activation, config

    decision = activation.decide()
    if decision.activate:
        config.use_forked_workers()
        gc.freeze()  # what is imported stays: vLLM's imports would look through torch's again and again
        return "npu_platform.platform.NPUPlatform"
    if not _said:
        _said = True
        # A warning, since vLLM has not set logging up yet, and would drop anything less.
        logging.getLogger("vllm.npu_platform").warning("%s %s", decision.reason, decision.remedy or "")
    return None
