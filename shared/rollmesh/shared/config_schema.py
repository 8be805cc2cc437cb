"""JSON schema of a configuration type, for editors, with the description that stands after each field in the source."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import msgspec


def json_schema(type_: type) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a msgspec struct tree. Field docstrings become `description`s."""
    schemas, components = msgspec.json.schema_components([type_], ref_template="#/$defs/{name}")
    for struct in _structs_below(type_):
        definition = components.get(struct.__name__)
        for field, text in field_docs(struct).items():
            if definition is not None and field in definition.get("properties", {}):
                definition["properties"][field].setdefault("description", text)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[0], "$defs": components}


@functools.cache
def field_docs(type_: type) -> dict[str, str]:
    """The string that follows each annotated field in the class body; of bases too. Empty without source."""
    docs: dict[str, str] = {}
    for cls in reversed(type_.__mro__):
        if issubclass(cls, msgspec.Struct) and cls is not msgspec.Struct:
            docs.update(_own_docs(cls))
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[field.target.id] = inspect.cleandoc(after.value.value)
    return docs


def _structs_below(type_: type) -> set[type]:
    """Every struct class reachable from `type_`."""
    found: set[type] = set()
    pending: list[Any] = [msgspec.inspect.type_info(type_)]
    while pending:
        node = pending.pop()
        if isinstance(node, msgspec.inspect.StructType):
            if node.cls in found:
                continue
            found.add(node.cls)
            pending += [field.type for field in node.fields]
        pending += getattr(node, "types", ())
        pending += [below for name in ("item_type", "value_type") if (below := getattr(node, name, None)) is not None]
    return found
