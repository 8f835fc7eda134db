"""The commands of npu-stat, a module each, and what they share; none of them needs vLLM."""
