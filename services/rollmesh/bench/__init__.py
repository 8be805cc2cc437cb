"""Benchmarks: `rollmesh bench [NAME ...]`. Each module describes what it measures, its baseline, and how to read the result."""
