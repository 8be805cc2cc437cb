"""How a field is refused, the same everywhere."""

from __future__ import annotations

from typing import NoReturn

from rollmesh.shared.errors import FieldViolation, InvalidInput


def invalid(field: str, what: str) -> NoReturn:
    """Raises `InvalidInput` that names the field: `episode.segments[3].logprobs: 12 values for 13 tokens`."""
    raise InvalidInput(f"{field}: {what}", violations=[FieldViolation(field, what)])
