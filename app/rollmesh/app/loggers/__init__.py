"""Loggers of runs outside the run folder."""
