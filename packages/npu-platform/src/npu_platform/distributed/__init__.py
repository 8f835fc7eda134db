"""Groups of npu devices under vLLM."""
