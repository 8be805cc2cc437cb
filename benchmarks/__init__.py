"""Benchmarks: `python -m benchmarks [NAME ...]`. Each module describes what it measures, its baseline, and how to read
the result."""
