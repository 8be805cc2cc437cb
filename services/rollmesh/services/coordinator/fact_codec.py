"""Records of the core <-> protobuf, by field name: facts, ledger records, and the values that servicers share with
them.

A mapper is built once per record class from its type hints. A record and its message have the same field names
(`facts.py` is generated). The servicers handle what the core does not model: defaults of RunSpec, and long polls.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.records import Request
from rollmesh.shared.config.settings import SettingError
from rollmesh.shared.domain.extras import ExtraError, decode_extras, encode_extras
from rollmesh.shared.domain.formats import check_format, newer_format
from rollmesh.shared.domain.ledger_facts import fact_of
from rollmesh.shared.domain.ledger_head import RECORD_FORMAT
from rollmesh.shared.domain.protocol import PROTOCOL, UNREPORTED, ProtocolVersion
from rollmesh.shared.errors import InvalidInput, field_error
from rollmesh.v1 import events_pb2

T = TypeVar("T")
Q = TypeVar("Q", bound=Request[Any])
E = TypeVar("E", bound=IntEnum)
_SCALARS = (str, int, float, bool, bytes)
Message = Any  # generated messages, accessed by field name, which their stubs cannot type


class _Field(NamedTuple):
    name: str
    put: Callable[[Message, Any], None]
    get: Callable[[Message], Any]


class _Fields(NamedTuple):
    scalars: tuple[str, ...]
    """Fields with the same value in the record and the message."""
    others: tuple[_Field, ...]


def encode_into(value: object, message: Message) -> None:
    """Fill `message`, which must be empty, from a record."""
    fields = _fields(type(value))
    for name in fields.scalars:
        setattr(message, name, getattr(value, name))
    for field in fields.others:
        field.put(message, getattr(value, field.name))


def known_member(type_: type[E], value: int) -> E | None:
    """Return the member of `type_` with this number, or None."""
    return type_(value) if value in set(type_) else None


def encode(value: object, message_type: Callable[[], T]) -> T:
    """Return `value` as a new message."""
    message = message_type()
    encode_into(value, message)
    return message


def decode(type_: type[T], message: Message) -> T:
    """Return `message` as a record. Raises InvalidInput for an unknown enum value, ValueError for a value out of
    range."""
    return type_(**_values(type_, message))


def decode_request(type_: type[Q], ticket: int, message: Message) -> Q:
    """Return a request that the core takes as it is. Raises what `decode` raises."""
    return type_(ticket=ticket, **_values(type_, message))


def _values(type_: type, message: Message) -> dict[str, Any]:
    fields = _fields(type_)
    values = {name: getattr(message, name) for name in fields.scalars}
    for field in fields.others:
        values[field.name] = field.get(message)
    return values


_FIELDS: dict[type, _Fields] = {}
"""Mappers by record class, built at the first use."""


def _fields(type_: type) -> _Fields:
    if (found := _FIELDS.get(type_)) is not None:
        return found
    hints = {name: hint for name, hint in typing.get_type_hints(type_).items() if not name.startswith("_")}
    hints.pop("ticket", None)  # of a Request, which is not in the message
    found = _FIELDS[type_] = _Fields(
        scalars=tuple(name for name, hint in hints.items() if hint in _SCALARS),
        others=tuple(_field(name, hint) for name, hint in hints.items() if hint not in _SCALARS),
    )
    return found


def _field(name: str, hint: Any) -> _Field:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _tuple(name, args[0])
    if origin is dict:
        return _json_dict(name) if args[1] is Any else _dict(name)
    if origin is typing.Literal:
        return _Field(name, lambda m, v: setattr(m, name, v), lambda m: getattr(m, name))
    if origin in (types.UnionType, typing.Union) and int in args and types.NoneType not in args:
        return _number_or_word(name)
    if origin in (types.UnionType, typing.Union):
        return _optional(name, next(arg for arg in args if arg is not types.NoneType))
    if issubclass(hint, IntEnum):
        return _enum(name, hint)
    return _Field(name, lambda m, v: _put_message(m, name, v), lambda m: _get_message(m, name, hint))


def _put_message(message: Message, name: str, value: object) -> None:
    below = getattr(message, name)
    below.SetInParent()
    encode_into(value, below)


def _get_message(message: Message, name: str, type_: Any) -> Any:
    try:
        return decode(type_, getattr(message, name))
    except SettingError as error:
        raise SettingError(f"{name}.{error.field}", error.what) from error


def _tuple(name: str, item: Any) -> _Field:
    if item in _SCALARS or typing.get_origin(item) is typing.Literal:
        return _Field(name, lambda m, v: getattr(m, name).extend(v), lambda m: tuple(getattr(m, name)))

    def put(message: Message, values: Sequence[object]) -> None:
        repeated = getattr(message, name)
        for value in values:
            encode_into(value, repeated.add())

    def get(message: Message) -> tuple[Any, ...]:
        found = []
        for index, below in enumerate(getattr(message, name)):
            try:
                found.append(decode(item, below))
            except SettingError as error:
                raise SettingError(f"{name}[{index}].{error.field}", error.what) from error
        return tuple(found)

    return _Field(name, put, get)


_DIGITS_MAX = 18
"""Most digits of a number. `int` raises ValueError for a text of thousands of digits."""


def _number_or_word(name: str) -> _Field:
    """A whole number or a word, whose text the message has."""

    def get(message: Message) -> int | str:
        text: str = getattr(message, name)
        return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else text

    return _Field(name, lambda m, v: setattr(m, name, str(v)), get)


def _dict(name: str) -> _Field:
    return _Field(name, lambda m, v: getattr(m, name).update(v), lambda m: dict(getattr(m, name)))


def _json_dict(name: str) -> _Field:
    """JSON values by name, each of which the message has as text."""

    def get(message: Message) -> dict[str, object]:
        try:
            return decode_extras(getattr(message, name))
        except ExtraError as error:
            raise SettingError(f"{name}.{error.name}", error.what) from None

    return _Field(name, lambda m, v: getattr(m, name).update(encode_extras(v)), get)


def _optional_scalar(name: str) -> _Field:
    def put(message: Message, value: object) -> None:
        if value is not None:
            setattr(message, name, value)

    return _Field(name, put, lambda m: getattr(m, name) if m.HasField(name) else None)


def _optional(name: str, type_: Any) -> _Field:
    if type_ in _SCALARS:
        return _optional_scalar(name)

    def put(message: Message, value: object) -> None:
        if value is not None:
            _put_message(message, name, value)

    def get(message: Message) -> Any:
        return _get_message(message, name, type_) if message.HasField(name) else None

    return _Field(name, put, get)


def _enum(name: str, type_: type[IntEnum]) -> _Field:
    known = {int(member): member for member in type_}

    def get(message: Message) -> IntEnum:
        value = getattr(message, name)
        if value not in known:
            raise field_error(name, "be one of " + ", ".join(f"{m.value} ({m.name})" for m in type_), value)
        return known[value]

    return _Field(name, lambda m, v: setattr(m, name, int(v)), get)


# Facts ----------------------------------------------------------------------------------------------------------------


FACT_TYPES: dict[str, type] = {type_.__name__: type_ for type_ in typing.get_args(f.Fact)}
"""Every fact class by its name, which is that of its message."""
_ONEOF_FIELDS = {
    type(getattr(events_pb2.Fact(), field.name)).__name__: field.name for field in events_pb2.Fact.DESCRIPTOR.fields
}
"""Name of a fact in the oneof of `Fact`, by the name of its message."""


class DecodedRecord(NamedTuple):
    """A decoded LedgerRecord."""

    record_id: str
    time_unix_s: float
    facts: tuple[f.Fact, ...]
    previous: str
    """Hash of the previous record, in hex."""
    protocol: ProtocolVersion = PROTOCOL
    """Protocol of the coordinator that wrote it."""


def encode_record(
    record_id: str,
    time_unix_s: float,
    facts: Sequence[f.Fact],
    previous: str = "",
    protocol: ProtocolVersion = PROTOCOL,
) -> bytes:
    """Return one decision as the bytes of a LedgerRecord. `previous` is the hash of the previous record, in hex."""
    record = events_pb2.LedgerRecord(
        record_id=record_id,
        time_unix_s=time_unix_s,
        previous=bytes.fromhex(previous),
        protocol_minor=protocol.minor,
        protocol_major=protocol.major,
    )
    if any(isinstance(fact, f.ArchiveSealed) for fact in facts):
        record.format = RECORD_FORMAT
    for fact in facts:
        below = getattr(record.facts.add(), _ONEOF_FIELDS[type(fact).__name__])
        below.SetInParent()  # a fact with defaults only must still be present
        encode_into(fact, below)
    return record.SerializeToString()


def decode_record(payload: bytes) -> DecodedRecord:
    """Return the record in a ledger record's bytes.

    Raises InvalidInput if the bytes are not a LedgerRecord, NewerFormat for a record or a fact of a later release,
    ValueError for values out of range.
    """
    try:
        record = events_pb2.LedgerRecord.FromString(payload)
    except DecodeError as error:
        raise InvalidInput(f"cannot decode a LedgerRecord from {len(payload)} bytes") from error
    check_format(f"ledger record {record.record_id[:80]!r}", record.format, RECORD_FORMAT)
    facts = tuple(decode_fact(fact) for fact in record.facts)
    protocol = ProtocolVersion(major=record.protocol_major or UNREPORTED.major, minor=record.protocol_minor)
    return DecodedRecord(record.record_id, record.time_unix_s, facts, record.previous.hex(), protocol)


def decode_fact(message: events_pb2.Fact) -> f.Fact:
    known = fact_of(message)
    if known is None:
        raise newer_format("a ledger record holds a fact that this release does not know")
    fact: f.Fact = decode(FACT_TYPES[type(known).__name__], known)
    return fact
