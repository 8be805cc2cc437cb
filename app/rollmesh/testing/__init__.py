"""Fakes that pass the conformance suites of the real engines: for tests, simulations and benchmarks without a model or
a GPU."""
