"""The ops, one file a family: schema, meta function and plain-torch reference of each."""

from npu_ops.definitions import activation, attention, cache, embedding, layernorm, linear, rotary, sampling

__all__ = ["activation", "attention", "cache", "embedding", "layernorm", "linear", "rotary", "sampling"]
