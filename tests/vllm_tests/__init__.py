"""vLLM's own tests, from its source distribution, run with the device npu."""
