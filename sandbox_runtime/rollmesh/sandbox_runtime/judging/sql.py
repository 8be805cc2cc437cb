"""Run one query on a fresh database for a judgment. The candidate's and the reference query have separate sessions.

The operator's statements create the database. It is then read-only: an authorizer rejects everything but reading, so
that a query cannot attach files, change rows or set pragmas. Rows are returned as JSON.
"""

from __future__ import annotations

import json
from typing import Any

ROWS_MAX = 10_000
"""Maximum rows of an answer."""


def query(setup: str, text: str) -> str:
    """Return JSON of `{"rows": [...]}`. Raises sqlite3's errors, whose texts the author of the query may read, and
    ValueError for a text without a query."""
    import sqlite3  # only sessions of this kind need it

    allowed = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

    def authorize(action: int, *_details: Any) -> int:
        return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY

    connection = sqlite3.connect(":memory:")
    connection.executescript(setup)
    connection.commit()
    connection.set_authorizer(authorize)
    cursor = connection.execute(text)
    if cursor.description is None:
        raise ValueError("the text is not a query; it is empty, a comment, or a statement without a result")
    rows = cursor.fetchmany(ROWS_MAX + 1)
    if len(rows) > ROWS_MAX:
        raise ValueError(f"the query gives more than {ROWS_MAX} rows")
    return json.dumps({"rows": [[_plain(value) for value in row] for row in rows]}, allow_nan=False)


def _plain(value: object) -> object:
    """Encode blobs and infinities, which JSON lacks, as objects, which never equal an SQL text."""
    if isinstance(value, bytes):
        return {"blob": value.hex()}
    if isinstance(value, float) and value - value != 0:
        return {"real": repr(value)}
    return value
