"""vLLM's own tests of many devices and of shutdown, from its source distribution, run with the device npu."""
