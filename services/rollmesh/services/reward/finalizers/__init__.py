"""Finalizers; one idea per file."""
