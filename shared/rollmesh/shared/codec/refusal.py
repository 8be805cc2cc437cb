"""How a field is refused, the same everywhere."""

from __future__ import annotations

from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from rollmesh.shared.errors import FieldViolation, InvalidInput


def invalid(field: str, what: str) -> NoReturn:
    """Raises `InvalidInput` that names the field: `episode.segments[3].logprobs: 12 values for 13 tokens`."""
    raise InvalidInput(f"{field}: {what}", violations=[FieldViolation(field, what)])


def refuse_unknown(message: Any, field: str) -> None:
    """Raises `InvalidInput` if `message` carries fields of newer protos: for messages that mean something else without
    them."""
    unknown = UnknownFieldSet(message)
    numbers = sorted({unknown[index].field_number for index in range(len(unknown))})
    if numbers:
        invalid(field, f"holds field {numbers[0]}, which this version does not know; upgrade the mesh, or leave it out")
