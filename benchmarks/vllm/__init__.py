"""`python -m benchmarks vllm`: the torch engine beside vLLM, behind the same port."""
