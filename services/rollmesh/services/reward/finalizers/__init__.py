"""Finalisers; one idea per file."""
