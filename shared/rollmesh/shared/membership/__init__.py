"""Nodes of a mesh: how one joins, reports and leaves, and what the others see of it."""
