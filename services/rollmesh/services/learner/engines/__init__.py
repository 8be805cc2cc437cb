"""Trainers behind the learner's port, loaded by dotted name."""
