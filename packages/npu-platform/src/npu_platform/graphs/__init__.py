"""Device graphs in vLLM: which sizes are captured, and the wrapper that captures and replays them."""
