"""Limits that both sides of a call must agree on."""

MESSAGE_BYTES_MAX = 8 * 1024 * 1024
"""Largest message either way."""
TEXT_BYTES_MAX = 64 * 1024
"""Largest text in a request of RunService or CoordinatorService: names, causes and settings, which end up in ledger records."""
