"""Sampling on npu, and the bodies of the Triton kernels that vLLM's runner launches."""
