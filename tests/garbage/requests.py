"""Malformed requests, generated from the descriptor of a method's request type.

A case is a name and the bytes to send. Most cases are a plausible request with one field changed, so that a server gets
past the checks of the other fields; the rest are bytes that are not a request at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rollmesh.shared.domain.reward_range import REWARD_ABS_MAX
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX

DEPTH_MAX = 3
ABSURD = 10**9
"""A count that fits into every integer, and that no server can hold."""
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, ABSURD, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, ABSURD, 2**62, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, ABSURD, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, ABSURD, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 99, 2**31 - 1),
}
FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 1e308, -1e308, 2 * REWARD_ABS_MAX, 5e-324)
NAME_BYTES = 100_000
NOT_UTF_8 = b"\xff\xff"
REPEATED = 10_000


@dataclass(frozen=True)
class Case:
    """One malformed request."""

    name: str
    raw: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the large cases are."""

    text_bytes: int = 200_000
    oversized: bool = True
    """Whether one case is above the size limit of a message."""


def cases(
    method: str, descriptor: Descriptor, plausible: Mapping[str, Any], foreign: Mapping[str, Any], sizes: Sizes
) -> Iterator[Case]:
    """Every case of a request type. `plausible` has values by the name of a field, `foreign` those of another run and
    node; the same method gets the same cases."""
    draw = random.Random(method)
    base = filled(descriptor, plausible)
    yield Case("empty", b"")
    yield Case("plausible", base.SerializeToString())
    for num_bytes in (1, 17, 4_000):
        yield Case(f"{num_bytes} random bytes", draw.randbytes(num_bytes))
    yield Case("nested groups", b"\x0b" * 5_000)
    yield Case("unknown fields", b"\xfa\x3e\x02hi" * 1_000)
    raw = base.SerializeToString()
    if len(raw) > 1:
        yield Case("cut off", raw[: len(raw) // 2])
    if sizes.oversized:
        yield Case("oversized", b"\x0a" + _varint(MESSAGE_BYTES_MAX) + bytes(MESSAGE_BYTES_MAX))
    for name in sorted(foreign):
        request = filled(descriptor, {**plausible, name: foreign[name]})
        if request != base:
            yield Case(f"{name} of another", request.SerializeToString())
    yield Case("all of another", filled(descriptor, {**plausible, **foreign}).SerializeToString())
    for name, kind in _KINDS.items():
        request = filled(descriptor, plausible)
        _set_all(request, kind, DEPTH_MAX)
        yield Case(f"all {name}", request.SerializeToString())
    for path, make in _mutations(descriptor, sizes, DEPTH_MAX):
        for name, change in make:
            request = filled(descriptor, plausible)
            change(request)
            yield Case(f"{path} {name}", request.SerializeToString())
    for number, wire in ((f.number, f.name) for f in descriptor.fields if f.type == FieldDescriptor.TYPE_STRING):
        yield Case(f"{wire} not UTF-8", raw + _varint(number << 3 | 2) + b"\x02" + NOT_UTF_8)


def filled(descriptor: Descriptor, plausible: Mapping[str, Any], depth: int = DEPTH_MAX) -> Any:
    """A message of the type with the plausible values that it has fields for."""
    message = message_factory.GetMessageClass(descriptor)()
    for one in descriptor.fields:
        if one.containing_oneof is not None and one.containing_oneof.fields[0] is not one:
            continue
        value = plausible.get(one.name)
        if value is not None and isinstance(value, Message) is (one.message_type is not None):
            _put(message, one, value)
        elif one.message_type is not None and not one.is_repeated and depth:
            getattr(message, one.name).CopyFrom(filled(one.message_type, plausible, depth - 1))
    return message


def _put(message: Any, one: FieldDescriptor, value: Any) -> None:
    if one.message_type is not None:
        getattr(message, one.name).CopyFrom(value)
    elif isinstance(value, str) is not (one.type == FieldDescriptor.TYPE_STRING):
        return  # another field of that name
    elif one.is_repeated:
        getattr(message, one.name).append(value)
    else:
        setattr(message, one.name, value)


def _mutations(descriptor: Descriptor, sizes: Sizes, depth: int) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """By the path of a field: named changes of a request of this type."""
    for one in descriptor.fields:
        if one.message_type is None:
            yield one.name, [(name, _setter(one, value)) for name, value in _values(one, sizes)]
        elif one.message_type.GetOptions().map_entry:
            yield one.name, [(name, _entries(one, keys, value)) for name, keys, value in _map_values(one)]
        else:
            if one.is_repeated:
                yield one.name, [(f"{REPEATED} of them", _adder(one, REPEATED))]
            if depth:
                for path, changes in _mutations(one.message_type, sizes, depth - 1):
                    yield f"{one.name}.{path}", [(name, _inside(one, change)) for name, change in changes]


def _values(one: FieldDescriptor, sizes: Sizes) -> Iterator[tuple[str, Any]]:
    if one.cpp_type in INTEGERS:
        yield from ((str(value), value) for value in INTEGERS[one.cpp_type])
    elif one.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        yield from ((str(value), value) for value in FLOATS)
    elif one.type == FieldDescriptor.TYPE_STRING:
        yield from (
            ("empty", ""),
            ("control characters", "a\0b\n"),
            ("a path", "../../etc/passwd"),
            ("of another", "nothing"),
        )
        yield f"{sizes.text_bytes} bytes", "x" * sizes.text_bytes
    elif one.type == FieldDescriptor.TYPE_BYTES:
        yield from (("empty", b""), ("odd", b"\xff\x00\x7f"), (f"{sizes.text_bytes} bytes", b"\xff" * sizes.text_bytes))
    elif one.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        yield "true", True


_KINDS: dict[str, Callable[[FieldDescriptor], Any]] = {
    "numbers negative": lambda one: _number(one, -1),
    "numbers absurd": lambda one: _number(one, ABSURD),
    "numbers the largest": lambda one: _number(one, INTEGERS.get(one.cpp_type, (0,))[-1], 1e308),
    "numbers NaN": lambda one: _number(one, None, float("nan")),
    "numbers beyond the range of rewards": lambda one: _number(one, None, 2 * REWARD_ABS_MAX),
    f"texts {NAME_BYTES} bytes": lambda one: "n" * NAME_BYTES if one.type == FieldDescriptor.TYPE_STRING else None,
}
"""What all fields of a kind get at once. None leaves a field as it is."""


def _number(one: FieldDescriptor, whole: int | None, fraction: float | None = None) -> float | None:
    if one.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return float(whole) if fraction is None and whole is not None else fraction
    if one.cpp_type not in INTEGERS or whole is None:
        return None
    return whole if whole >= 0 or min(INTEGERS[one.cpp_type]) < 0 else None


def _set_all(message: Any, kind: Callable[[FieldDescriptor], Any], depth: int) -> None:
    """Set the fields of a message and of those inside it, each repeated one to one value if it has none."""
    for one in message.DESCRIPTOR.fields:
        if one.message_type is None:
            if (value := kind(one)) is not None:
                _setter(one, value)(message)
        elif depth and not one.message_type.GetOptions().map_entry:
            inner = getattr(message, one.name)
            if one.is_repeated and not inner:
                inner.add()
            for part in inner if one.is_repeated else (inner,):
                _set_all(part, kind, depth - 1)


def _map_values(one: FieldDescriptor) -> Iterator[tuple[str, list[Any], Any]]:
    """Named entries of a map: its keys, and the value of each. None stands for a message without fields."""
    assert one.message_type is not None
    key, value = (one.message_type.fields_by_name[name] for name in ("key", "value"))
    texts = key.type == FieldDescriptor.TYPE_STRING
    values: list[Any] = list(INTEGERS.get(value.cpp_type, ())) or ["v", "v" * NAME_BYTES]
    if value.message_type is not None:
        values = [None]
    elif value.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        values = list(FLOATS)
    yield f"{REPEATED} entries", [f"k{n}" if texts else n for n in range(REPEATED)], values[0]
    yield "an odd key", ["k" * NAME_BYTES if texts else -1], values[0]
    yield from ((f"value {value!s:.20}", ["k" if texts else 1], value) for value in values)


def _entries(one: FieldDescriptor, keys: list[Any], value: Any) -> Any:
    def change(message: Any) -> None:
        entries = getattr(message, one.name)
        for key in keys:
            if value is None:
                entries[key].SetInParent()
            else:
                entries[key] = value

    return change


def _setter(one: FieldDescriptor, value: Any) -> Any:
    def change(message: Any) -> None:
        if one.is_repeated:
            getattr(message, one.name).extend([value, value])
        else:
            setattr(message, one.name, value)

    return change


def _adder(one: FieldDescriptor, number: int) -> Any:
    def change(message: Any) -> None:
        for _ in range(number):
            getattr(message, one.name).add()

    return change


def _inside(one: FieldDescriptor, change: Any) -> Any:
    def outer(message: Any) -> None:
        change(getattr(message, one.name).add() if one.is_repeated else getattr(message, one.name))

    return outer


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
