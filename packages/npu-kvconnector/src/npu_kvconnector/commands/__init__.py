"""What `npu-kv` does with the store of a durable tier; one module a kind of command."""
