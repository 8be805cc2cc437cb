"""Validate the JSON value of the answer against a JSON schema: 1 if it is valid, else 0.

The schema is the option `schema`, or a field of the line of the task file. The value is the text that `pattern` finds;
if that has fenced blocks, it is the last of them. A text that is not JSON is wrong: names that occur twice, NaN and
infinite numbers are not JSON here. The comparison runs in a worker process, because a `pattern` of the schema may need
time without bound; an answer that needs more than `compare_s_max` of CPU time, or is nested too deeply, is wrong.

fastjsonschema validates by drafts 4, 6 and 7. `format` is an annotation, and `default` adds nothing. A `$ref` to
another document is an error of the schema, so that no schema loads a file or a URL.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import not_applicable
from rollmesh.services.reward.scorers.compared import ComparedOptions, ComparedScorer
from rollmesh.services.reward.scorers.extract import compile_pattern, shorten
from rollmesh.services.reward.scorers.tests import CODE_BLOCK
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.records import last_match

_FENCED = compile_pattern("pattern", CODE_BLOCK)


class JsonSchemaOptions(ComparedOptions):
    """Settings of the scorer of JSON schemas. With an empty `pattern`, the default, the value is the last fenced block
    of the message, or the whole message."""

    pattern: str = ""
    """Regular expression of the text with the value, as for `exact`. Empty means the whole text."""
    schema: dict[str, Any] = {}
    """Schema for all tasks. Empty: each task has one in `field`."""
    field: str = "schema"
    """Field of the line of the task file with the schema: an object, or its JSON text."""


class JsonSchemaScorer(ComparedScorer):
    """See the module. It does not apply to a task without a schema."""

    Options: ClassVar[type[msgspec.Struct]] = JsonSchemaOptions
    version = "1"
    worker = "rollmesh.services.reward.schema_worker"
    what = "schema"

    def __init__(self, *, options: JsonSchemaOptions) -> None:
        if importlib.util.find_spec("fastjsonschema") is None:
            raise ConfigError("the scorer json_schema needs fastjsonschema: pip install 'rollmesh[verify]'")
        super().__init__(options=options)
        self._field = options.field
        self._schema = json.dumps(options.schema, sort_keys=True) if options.schema else ""
        if options.schema:
            _require_usable(options.schema)

    async def score(self, item: ScoreItem) -> Reward:
        schema = self._schema or self._schema_of(item)
        if not schema:
            return not_applicable("the task has no schema")
        found = self._extractor.find(item)
        if not found:
            return Reward(name="", value=0.0, evidence="no answer found")
        block = last_match(_FENCED, found) if "```" in found else found
        if block is None:
            return Reward(name="", value=0.0, evidence="the fenced block does not end")
        reply = await self._pool.ask({"schema": schema}, block)
        if reply is None:
            return Reward(name="", value=0.0, evidence="needs too much CPU time", answer=shorten(block))
        why = str(reply["why"]) or "valid"
        return Reward(name="", value=float(reply["equal"]), evidence=why, answer=shorten(block))

    def _schema_of(self, item: ScoreItem) -> str:
        """Return the schema of the task as a JSON text, or "" if it has none. Raise TypeError."""
        given = None if item.answer_key is None else item.answer_key.record.get(self._field)
        if given is None or isinstance(given, str):
            return given or ""
        if not isinstance(given, Mapping | bool):
            raise TypeError(
                f"the field `{self._field}` of the task must be a JSON schema or its text, got a "
                f"{type(given).__name__}; correct the task or `field`"
            )
        return json.dumps(given, sort_keys=True)


def _require_usable(schema: Mapping[str, Any]) -> None:
    from rollmesh.services.reward.schema_worker import UNUSABLE, compile_schema

    try:
        compile_schema(schema)
    except UNUSABLE as error:
        raise ConfigError(f"`schema` of the scorer json_schema must be a JSON schema: {error}") from None
