"""Attention on npu: the backend, its metadata, the paged implementation and its plain-torch reference."""
