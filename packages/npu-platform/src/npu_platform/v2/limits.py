"""How much of some settings a request may bring to vLLM's V2 runner, whose buffers hold so much of each for a request.

vLLM looks at that where the buffers are filled, in the engine's process, which ends by it, with every other request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_platform.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm import SamplingParams

__all__ = ["refuse"]

_OF_THE_MODEL = 16
"""Places among the stop tokens that are left to the model's own, which are added to a request's later."""


def refuse(params: SamplingParams) -> None:
    """Raise UnsupportedFeatureError, naming the setting, for a request that asks for more than the buffers hold."""
    from vllm.v1.worker.gpu.sample import logit_bias

    stops = params.stop_token_ids if params.min_tokens else None
    for name, given, most in (
        ("allowed_token_ids", params.allowed_token_ids, logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", params.logit_bias, logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids", stops, logit_bias.MAX_NUM_STOP_TOKEN_IDS - _OF_THE_MODEL),
    ):
        if given and len(given) > most:
            beside = " beside min_tokens" if given is stops else ""
            msg = (
                f"{name}{beside} must have at most {most} entries for vLLM's V2 model runner, got {len(given)}: "
                "give fewer, or start the server with VLLM_USE_V2_MODEL_RUNNER=0."
            )
            raise UnsupportedFeatureError(msg)
