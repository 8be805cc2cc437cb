"""JSON schema of a configuration type, for editors. Descriptions are the strings that follow the fields in the
source."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator
from inspect import cleandoc, getsource
from typing import Any

import msgspec
from msgspec import inspect

from rollmesh.shared.config.settings import type_info

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(type_: type) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a tree of msgspec structs, with the docstrings of fields as
    `description`."""
    schemas, components = msgspec.json.schema_components([type_], ref_template="#/$defs/{name}")
    for struct in {node.cls for node in _nodes(type_info(type_)) if isinstance(node, inspect.StructType)}:
        definition = components[struct.__name__]
        for field, text in field_docs(struct).items():
            if field in definition.get("properties", {}):
                definition["properties"][field].setdefault("description", text)
        if hasattr(struct, "short_form"):  # the loader fills the field in, see `config.py`
            definition["required"] = [name for name in definition["required"] if name != struct.short_form]
            components[struct.__name__] = {"anyOf": [{"type": "string"}, definition]}
    return {"$schema": DIALECT, **schemas[0], "$defs": components}


@functools.cache
def field_docs(type_: type) -> dict[str, str]:
    """Return the string that follows each annotated field in the class body, including those of bases. Empty without
    source."""
    docs: dict[str, str] = {}
    for cls in reversed(type_.__mro__):
        if issubclass(cls, msgspec.Struct) and cls is not msgspec.Struct:
            docs.update(_own_docs(cls))
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[field.target.id] = cleandoc(after.value.value)
    return docs


def _nodes(node: inspect.Type) -> Iterator[inspect.Type]:
    """`node` and every type below it."""
    yield node
    below = [field.type for field in node.fields] if isinstance(node, inspect.StructType) else []
    below += [getattr(node, name) for name in ("type", "item_type", "value_type") if hasattr(node, name)]
    for child in (*below, *getattr(node, "types", ()), *getattr(node, "item_types", ())):
        yield from _nodes(child)
