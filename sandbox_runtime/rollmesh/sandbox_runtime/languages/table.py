"""The result of a query as JSON text: {"columns": [...], "rows": [[...], ...]}, cut at whole rows.

Numbers, text, booleans and null keep their JSON form. Bytes become {"hex": "..."} and decimals become numbers. Lists
and structures stay lists and structures. Everything else (dates, intervals, uuids, not-a-number) becomes text.
"""

from __future__ import annotations

import decimal
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rollmesh.sandbox_runtime.languages.port import OK, Reply

ROWS_MAX = 10_000


def table_reply(columns: Sequence[str], rows: Iterable[Sequence[Any]], bytes_max: int) -> Reply:
    """Encode at most `ROWS_MAX` rows and `bytes_max` bytes; `truncated` says whether rows were omitted."""
    head = json.dumps({"columns": list(columns), "rows": []}, ensure_ascii=False)[:-2]
    parts: list[str] = []
    room, cut = bytes_max - len(head.encode()) - 2, False
    for row in rows:
        text = json.dumps([plain(value) for value in row], ensure_ascii=False)
        room -= len(text.encode()) + 2
        if room < 0 or len(parts) == ROWS_MAX:
            cut = True
            break
        parts.append(text)
    return {"outcome": OK, "result": f"{head}{', '.join(parts)}]}}", "truncated": cut}


def plain(value: Any) -> Any:
    """Convert a value to a JSON value."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, decimal.Decimal):
        return plain(float(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"hex": bytes(value).hex()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)
