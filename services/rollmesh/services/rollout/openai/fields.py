"""Read the fields of a request's JSON, with errors that name the field as the client wrote it. Pure.

A field that is null counts as absent. A field that the server does not support is rejected unless its value asks for
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import InvalidInput, MeshError, described_field_error, field_error

S = TypeVar("S", bound=msgspec.Struct)

_AT = " - at `$"


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. Raise `InvalidInput`."""
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE as err:
        raise InvalidInput(f"the body must be a JSON object, got an error: {err}") from err
    if not isinstance(value, dict):
        raise InvalidInput(f"the body must be a JSON object, got {_kind(value)}")
    return value


def read_fields(
    type_: type[S],
    value: Mapping[str, Any],
    *,
    neutral: Mapping[str, tuple[Any, ...]],
    remedies: Mapping[str, str],
    at: str = "",
) -> S:
    """Return an object's fields as a struct. `at` is the path of the object.

    `neutral` has the values that other fields may have because they ask for nothing; an empty tuple allows all.
    `remedies` explain how to replace a field.
    """
    given = {name: field for name, field in value.items() if field is not None}
    prefix = f"{at}." if at else ""
    known = {field.encode_name for field in msgspec.structs.fields(type_)}
    for name in given.keys() - known:
        allowed = neutral.get(name)
        if allowed is None:
            remedy = remedies.get(name, "remove it")
            raise field_error(f"{prefix}{name}", "be absent, because it is not supported", given[name], remedy)
        if allowed and not any(given[name] == one and type(given[name]) is type(one) for one in allowed):
            must = "be " + " or ".join(msgspec.json.encode(one).decode() for one in allowed)
            remedy = "remove it, because other values are not supported"
            raise field_error(f"{prefix}{name}", must, given[name], remedy)
    try:
        return msgspec.convert({name: given[name] for name in given.keys() & known}, type_, strict=True)
    except msgspec.ValidationError as err:
        raise _located(err, prefix) from err


def _located(error: msgspec.ValidationError, prefix: str) -> MeshError:
    text = str(error)
    what, at, path = text.rpartition(_AT)
    if not at:
        what, path = text, ""
    field = prefix + path.removesuffix("`").removeprefix(".")
    _, missing, name = what.partition("missing required field `")
    if missing:
        return field_error(f"{field}.{name.removesuffix('`')}".replace("..", ".").lstrip("."), "be set", None)
    return described_field_error(field, f"is invalid: {what[0].lower()}{what[1:]}")


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", type(None): "null"}.get(type(value), type(value).__name__)
