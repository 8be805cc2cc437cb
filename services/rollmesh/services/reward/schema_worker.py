"""A process that validates JSON texts against JSON schemas (`worker_loop`).

The key of a request is `{"schema": "..."}`, a JSON text, and the reply `{"equal": bool, "why": "..."}`. `why` names the
place in the text and the keyword of the schema, but no value of the schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import fastjsonschema

from rollmesh.services.reward.worker_loop import serve

_KEYS_MAX = 64
"""Schemas that a worker remembers."""
_PATH_CHARS_MAX = 100
UNUSABLE = (
    fastjsonschema.JsonSchemaDefinitionException,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    re.error,
)
"""What the compiler raises for a schema that is not one."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of a task."""

    validate: Callable[[Any], Any] | None
    error: str = ""
    """Why nothing can be validated, or empty."""
    cpu_s: float = 0.0


class _LocalOnly(dict[str, Callable[[str], Any]]):
    """Handlers of references to other documents, for all schemes: they raise."""

    def __contains__(self, scheme: object) -> bool:
        return True

    def __missing__(self, scheme: str) -> Callable[[str], Any]:
        def reject(uri: str) -> NoReturn:
            raise fastjsonschema.JsonSchemaDefinitionException("it refers to another document")

        return reject


class Validator:
    """Validates texts with the compiled schema of a task."""

    def __init__(self) -> None:
        self._compiled = lru_cache(maxsize=_KEYS_MAX)(_compiled)

    def read(self, request: Mapping[str, Any]) -> Schema:
        return self._compiled(request["schema"])

    def reply(self, key: Schema, text: str) -> dict[str, Any]:
        if key.validate is None:
            return {"error": key.error}
        try:
            value = json.loads(text, parse_constant=_reject, parse_float=_finite, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            return {"equal": False, "why": f"not a JSON value ({type(error).__name__})"}
        try:
            key.validate(value)
        except fastjsonschema.JsonSchemaValueException as error:
            return {"equal": False, "why": f"{str(error.name)[:_PATH_CHARS_MAX]} violates `{error.rule}`"}
        except (RecursionError, ValueError, OverflowError, MemoryError) as error:
            return {"equal": False, "why": f"cannot be validated ({type(error).__name__})"}
        except ArithmeticError as error:
            return {"error": f"the schema of the key cannot be applied ({type(error).__name__}): is a `multipleOf` 0?"}
        return {"equal": True, "why": ""}


def _compiled(text: str) -> Schema:
    try:
        return Schema(compile_schema(json.loads(text)))
    except (*UNUSABLE, ValueError) as error:
        return Schema(None, f"the schema of the key cannot be compiled ({type(error).__name__})")


def compile_schema(schema: Any) -> Callable[[Any], Any]:
    """Return the validator of a schema. Raise an error of `UNUSABLE`.

    `format` is an annotation, as in the standard, and `default` adds nothing to the value.
    """
    made: Callable[[Any], Any] = fastjsonschema.compile(
        schema, handlers=_LocalOnly(), use_default=False, use_formats=False
    )
    return made


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


if __name__ == "__main__":
    serve(Validator)
