"""vLLM's offloading frame with jobs that may fail: the halves of the connector, and the manager of all tiers."""
