"""SQL, read-only, on a database file of the session: sqlite from the standard library, duckdb if the profile provides
it.

One statement per command, in a separate process. Both engines enforce read-only access in several ways: sqlite opens
the file read-only and calls an authorizer at every step; duckdb opens it read-only with access to other files disabled
and its settings locked.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from rollmesh.sandbox_runtime import files
from rollmesh.sandbox_runtime.languages import port
from rollmesh.sandbox_runtime.languages.forked import run_forked
from rollmesh.sandbox_runtime.languages.port import ProgramRejected, Reply
from rollmesh.sandbox_runtime.languages.table import table_reply
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.process_env import private_dir
from rollmesh.sandbox_runtime.program import Program

MODULES = {"sqlite": "_sqlite3", "duckdb": "duckdb"}
_IN_MEMORY = ":memory:"
_PRAGMAS = frozenset(
    ("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list")
)
_FORBIDDEN_FUNCTIONS = frozenset(("load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"))
_ACTIONS = (
    "ATTACH", "DETACH", "INSERT", "UPDATE", "DELETE", "PRAGMA", "FUNCTION", "TRANSACTION", "SAVEPOINT", "REINDEX",
    "ANALYZE",
    "ALTER_TABLE", "CREATE_TABLE", "CREATE_INDEX", "CREATE_VIEW", "CREATE_TRIGGER", "CREATE_VTABLE",
    "CREATE_TEMP_TABLE",
    "CREATE_TEMP_INDEX", "CREATE_TEMP_VIEW", "CREATE_TEMP_TRIGGER", "DROP_TABLE", "DROP_INDEX", "DROP_VIEW",
    "DROP_TRIGGER",
)  # fmt: skip
"""Actions of sqlite's authorizer by the names of its constants, for error messages."""
_GROWTH = 6
"""Factor by which a text can grow in JSON."""
_OVERHEAD_BYTES = 1 << 16


def is_here(language: str) -> bool:
    """Return whether the library of a language can be imported."""
    return importlib.util.find_spec(MODULES[language]) is not None


class Sql:
    """sqlite or duckdb."""

    def __init__(self, language: str, limits: Limits) -> None:
        self._query = {"sqlite": _sqlite, "duckdb": _duckdb}[language]
        self._limits = limits

    def run(self, program: Program, wall_s: float) -> Reply:
        """Run a query; see `port.Language`. The result is a table in JSON."""
        path, limits = _database(program), self._limits
        return run_forked(
            lambda: self._query(path, program.code, limits),
            wall_s=wall_s,
            cpu_s=limits.cpu_s,
            bytes_max=_GROWTH * limits.output_bytes + _OVERHEAD_BYTES,
        )


def _database(program: Program) -> str:
    if program.stdin or len(program.arguments) > 1:
        raise ProgramRejected(f"{program.language} takes one argument, the path of a database file, and no stdin")
    if not program.arguments:
        return _IN_MEMORY
    try:
        files.require_plain(program.arguments[0])
    except ValueError as error:
        raise ProgramRejected(str(error)) from None
    return os.path.join(private_dir(), program.arguments[0])


def _sqlite(path: str, query: str, limits: Limits) -> Reply:
    import sqlite3
    from urllib.parse import quote

    refused: list[str] = []
    try:
        name = path if path == _IN_MEMORY else f"file:{quote(path)}?mode=ro"
        connection = sqlite3.connect(name, uri=True, isolation_level=None)
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.set_authorizer(lambda *asked: _authorize(refused, *asked))
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or ()]
        return table_reply(columns, cursor, limits.output_bytes)
    except (sqlite3.Error, sqlite3.Warning) as error:
        why = f": only reading is allowed, not {refused[0]}" if refused else ""
        return port.failed(type(error).__name__, f"{error}{why}"[: limits.output_bytes])


def _authorize(refused: list[str], action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow reading and reject everything else."""
    import sqlite3

    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _PRAGMAS:
        return sqlite3.SQLITE_OK
    names = (name for name in _ACTIONS if getattr(sqlite3, f"SQLITE_{name}") == action)
    refused.append(next(names, f"ACTION_{action}").replace("_", " "))
    return sqlite3.SQLITE_DENY


def _duckdb(path: str, query: str, limits: Limits) -> Reply:
    import duckdb

    settings: dict[str, Any] = {
        "enable_external_access": "false", "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "threads": "1", "memory_limit": f"{limits.memory_bytes // 2 >> 20}MB", "lock_configuration": "true",
    }  # fmt: skip
    try:
        connection = duckdb.connect(path, read_only=path != _IN_MEMORY, config=settings)
        statements = connection.extract_statements(query)
        if len(statements) != 1:
            return port.failed("ProgrammingError", f"one statement at a time, got {len(statements)}")
        kind = statements[0].type
        if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
            return port.failed("PermissionError", f"not authorized: only reading is allowed, not {kind.name}")
        cursor = connection.execute(statements[0])
        columns = [column[0] for column in cursor.description or ()]
        return table_reply(columns, _rows(cursor), limits.output_bytes)
    except duckdb.OutOfMemoryException as error:
        return port.failed("MemoryError", str(error)[: limits.output_bytes], port.MEMORY)
    except duckdb.Error as error:
        return port.failed(type(error).__name__, str(error)[: limits.output_bytes])


def _rows(cursor: Any) -> Iterator[Any]:
    while batch := cursor.fetchmany(256):
        yield from batch
