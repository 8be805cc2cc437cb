"""Benchmarks: `rollmesh bench [NAME ...]`. One file per bench says what it measures, against what, and how to read it."""
