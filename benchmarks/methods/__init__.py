"""`python -m benchmarks methods`: recipes against their baselines on small tasks."""
