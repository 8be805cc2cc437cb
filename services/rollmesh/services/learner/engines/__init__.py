"""Implementations of the learner's trainer port, loaded by dotted name."""
