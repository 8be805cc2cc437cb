"""Base class of all settings. A setting is declared once, as a field with its type, range, default, change rule and
docstring.

The range stands in the annotation (`Annotated[int, Meta(ge=1)]`, mostly by an alias below) and holds for files, RPCs
and construction in Python. A field is fixed after its run began unless it, or the section around it, is marked `LIVE`.
The unit is the suffix of the name (`_s` is seconds) or is given in the docstring, which is the string after the field.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, dataclass_transform

import msgspec
from msgspec import Meta, inspect

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
NonEmptyStr = Annotated[str, Meta(min_length=1)]
OneOrMoreStr = NonEmptyStr | Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)]

LIVE = Meta(extra={"live": True})
"""The setting, and everything below it, may change when a run is resumed."""
FIXED = Meta(extra={"live": False})
"""The setting is fixed after its run began, although the section around it is `LIVE`."""


type_info: Callable[[Any], inspect.Type] = functools.lru_cache(maxsize=256)(inspect.type_info)
"""Returns the fields of a type. Inspecting that of a run takes 20 CPU ms, and a load needs it several times."""


class _SettingsMeta(msgspec.StructMeta):
    """Makes every subclass frozen, keyword-only and strict."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        defaults = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        return super().__new__(mcls, name, bases, namespace, **(defaults | options))


class SettingError(ValueError):
    """A value of settings is outside of its range, or does not fit the others."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"`{field}` {what}")
        self.field = field
        """Path of the field below the settings."""
        self.what = what
        """The requirement and the value: "must be >= 1, got 0"."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class Settings(msgspec.Struct, frozen=True, metaclass=_SettingsMeta):
    """A frozen struct whose values are within the ranges of its fields. Construction raises ValueError that names the
    field; it is a SettingError if a range is violated."""

    def __post_init__(self) -> None:
        for name, node in _constrained_fields(type(self)):
            for path, problem in _problems(node, getattr(self, name)):
                raise SettingError(f"{name}{path}", problem)
        self.check_fields()

    def check_fields(self) -> None:
        """Raise ValueError for values that are in range but do not fit together. Ranges have been checked before."""


# Ranges ---------------------------------------------------------------------------------------------------------------


def expectation(node: inspect.Type) -> str:
    """Return the requirement on a value of this type, such as "must be in [0, 60]"; empty if every value is valid."""
    node = plain(node)
    if isinstance(node, inspect.IntType | inspect.FloatType):
        return f"must be {text}" if (text := range_text(node)) else ""
    if isinstance(node, inspect.StrType) and node.pattern is not None:
        return f"must match {node.pattern}"
    least, most = getattr(node, "min_length", None), getattr(node, "max_length", None)
    if least == 1 and most is None:
        return "must not be empty"
    bounds = [f">= {least}"] * (least is not None) + [f"<= {most}"] * (most is not None)
    return f"must have a length {' and '.join(bounds)}" if bounds else ""


def range_text(node: inspect.Type) -> str:
    """Return the range of a number: ">= 1", "in [0, 60]", "in (0, 1)"; empty without a range."""
    node = plain(node)
    if not isinstance(node, inspect.IntType | inspect.FloatType):
        return ""
    low, high = (node.gt if node.ge is None else node.ge), (node.lt if node.le is None else node.le)
    if low is not None and high is not None:
        return f"in {'(' if node.ge is None else '['}{_number(low)}, {_number(high)}{')' if node.le is None else ']'}"
    if low is not None:
        return f"{'>' if node.ge is None else '>='} {_number(low)}"
    return f"{'<' if node.le is None else '<='} {_number(high)}" if high is not None else ""


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def plain(node: inspect.Type) -> inspect.Type:
    """Return `node` without metadata. For an optional type, return its other type."""
    while isinstance(node, inspect.Metadata):
        node = node.type
    if isinstance(node, inspect.UnionType):
        types = [one for one in node.types if not isinstance(one, inspect.NoneType)]
        return plain(types[0]) if len(types) == 1 else node
    return node


@functools.cache
def _constrained_fields(type_: type) -> tuple[tuple[str, inspect.Type], ...]:
    info = type_info(type_)
    assert isinstance(info, inspect.StructType)
    return tuple((field.name, node) for field in info.fields if _is_constrained(node := plain(field.type)))


def _is_constrained(node: inspect.Type) -> bool:
    below = [getattr(node, name) for name in ("item_type", "key_type", "value_type") if hasattr(node, name)]
    below += getattr(node, "item_types", ())
    return (
        isinstance(node, inspect.FloatType) or bool(expectation(node)) or any(_is_constrained(plain(b)) for b in below)
    )


def _problems(node: inspect.Type, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the path below the field ("" for the field) and the problem, for each wrong value."""
    if value is None:
        return
    node = plain(node)
    if not _meets(node, value):
        yield "", f"{expectation(node)}, got {shown(value)}"
    elif isinstance(node, inspect.FloatType) and not math.isfinite(value):
        yield "", f"must be finite, got {value}"
    if isinstance(node, inspect.DictType):
        for key, below in value.items():
            yield from ((f".{key}", text) for _, text in _problems(node.key_type, key))
            yield from ((f".{key}{path}", text) for path, text in _problems(node.value_type, below))
    elif isinstance(node, inspect.CollectionType | inspect.TupleType):
        types = node.item_types if isinstance(node, inspect.TupleType) else [node.item_type] * len(value)
        for index, (below_type, below) in enumerate(zip(types, value, strict=False)):
            yield from ((f"[{index}]{path}", text) for path, text in _problems(below_type, below))


def _meets(node: inspect.Type, value: Any) -> bool:
    if isinstance(node, inspect.IntType | inspect.FloatType):  # written so that a NaN fails
        low = value >= node.ge if node.ge is not None else node.gt is None or value > node.gt
        high = value <= node.le if node.le is not None else node.lt is None or value < node.lt
        return bool(low and high)
    if isinstance(node, inspect.StrType) and node.pattern is not None and not re.search(node.pattern, value):
        return False
    least, most = getattr(node, "min_length", None), getattr(node, "max_length", None)
    return (least is None or least <= len(value)) and (most is None or len(value) <= most)


def shown(value: object) -> str:
    """Return `value` for a message, truncated to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}... ({len(text)} characters)"


# Changes --------------------------------------------------------------------------------------------------------------


def may_change(type_: type, key: str) -> bool:
    """Return whether a resumed run may have another value at a dotted key of this configuration.

    The innermost mark decides. Without a mark the key is fixed. An unknown key follows the section that it is in.
    """
    node: inspect.Type | None = type_info(type_)
    live = False
    for step in key.split("."):
        node = _field_type(node, step)
        while isinstance(node, inspect.Metadata):
            live = (node.extra or {}).get("live", live)
            node = node.type
    return live


def _field_type(node: inspect.Type | None, step: str) -> inspect.Type | None:
    if isinstance(node, inspect.UnionType):
        return next((found for one in node.types if (found := _field_type(one, step)) is not None), None)
    if isinstance(node, inspect.StructType):
        return next((field.type for field in node.fields if field.encode_name == step), None)
    return node.value_type if isinstance(node, inspect.DictType) else None
