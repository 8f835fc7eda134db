"""NPUEncoderModelRunner: vLLM's runner of engines that encode images and nothing else, on npu."""

from __future__ import annotations

from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

from npu_platform.v2.model_runner import NPUModelRunnerV2

__all__ = ["NPUEncoderModelRunner"]


class NPUEncoderModelRunner(MMEncoderModelRunner, NPUModelRunnerV2):
    """What it does is vLLM's, and how the runner below it is made, and loads the model, is npu's."""
