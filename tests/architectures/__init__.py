"""Every architecture that vLLM registers and transformers has code for, in small, on npu: `nox -s models`."""
