"""Protobuf messages as plain values for JSON: fields as in the protos, numbers as numbers, zeros included, enums by
name."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

_EXACT_MAX = 1 << 53
"""Integers of JavaScript are exact up to here. Larger ones become strings."""


def plain(message: Message, *omit: str) -> dict[str, Any]:
    """Return the fields of a message. Absent messages and bytes are omitted, and so are the fields that `omit`
    names."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.name in omit or field.type == FieldDescriptor.TYPE_BYTES:
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = {str(key): _scalar(one) for key, one in value.items()}
        elif field.is_repeated:
            found[field.name] = [_value(field, one) for one in value]
        elif field.message_type is None or message.HasField(field.name):
            found[field.name] = _value(field, value)
    return found


def word(values: EnumDescriptor, number: int, prefix: str) -> str:
    """Return the name of an enum value without `prefix`, in lower case; the number of a value of a newer release."""
    return _name(values, number).removeprefix(prefix).lower()


def _name(values: EnumDescriptor, number: int) -> str:
    known = values.values_by_number.get(number)
    return str(number) if known is None else str(known.name)


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    return _scalar(value) if field.enum_type is None else _name(field.enum_type, value)


def _scalar(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    return str(value) if isinstance(value, int) and abs(value) > _EXACT_MAX else value
