"""Scorers; one idea per file."""
