"""Reject messages that have fields of a newer protocol."""

from __future__ import annotations

from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from rollmesh.shared.errors import Phrase, field_error


def refuse_unknown(message: Any, field: str) -> None:
    """Raises `InvalidInput` if `message` carries fields of newer protos: for messages that mean something else without
    them."""
    unknown = UnknownFieldSet(message)
    numbers = sorted({unknown[index].field_number for index in range(len(unknown))})
    if numbers:
        must = "have only fields that this version has"
        raise field_error(field, must, Phrase(f"field {numbers[0]}"), "upgrade the mesh, or remove the field")
