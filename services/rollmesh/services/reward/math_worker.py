"""A process that compares mathematical answers. It reads one JSON object per line and writes one per line, until its input ends.

Request `{"answers": [...], "text": "...", "limit_s": 5}`, reply `{"equal": bool, "understood": "..."}` or `{"error": "..."}`.
The comparison does not use the time limit of math-verify, because the parent kills this process after its timeout. If the parent has
exited, an alarm ends this process even in C code.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

ALARM_MARGIN_S = 2.0
"""Seconds between the timeout of the parent and the alarm, which ends orphans only."""


def main() -> None:
    memory_bytes_max = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    import math_verify  # after the limit, so that the limit applies to it

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + ALARM_MARGIN_S)
        reply = _reply(math_verify, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


def _reply(math_verify: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        answers = [_parse(math_verify, answer) for answer in request["answers"]]
        if not all(any(not isinstance(part, str) for part in answer) for answer in answers):
            return {"error": "an accepted answer of the key is not a mathematical expression"}
        found = _parse(math_verify, request["text"])
        equal = any(math_verify.verify(answer, found, timeout_seconds=None, raise_on_error=True) for answer in answers)
        return {"equal": bool(found) and equal, "understood": str(found[-1]) if found else ""}
    except Exception as error:  # noqa: BLE001 - recorded here only: the parent makes it an infra failure
        return {"error": f"{type(error).__name__}: {error}"}


def _parse(math_verify: Any, text: str) -> list[Any]:
    """Return the expressions that math-verify finds. It finds bare algebra such as `x+1` only between dollar signs."""
    found = math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
    return found or math_verify.parse(f"${text}$", parsing_timeout=None, raise_on_error=True)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
