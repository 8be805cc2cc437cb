"""The engine that runs vLLM in the node's process."""
