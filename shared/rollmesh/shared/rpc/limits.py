"""Limits that both sides of a call must agree on."""

MESSAGE_BYTES_MAX = 8 * 1024 * 1024
"""Largest message either way."""
