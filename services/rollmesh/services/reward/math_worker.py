"""The process that compares mathematical answers: one JSON object per line in, one out, until its input ends.

Request `{"answers": [...], "text": "...", "limit_s": 5}`, reply `{"equal": bool, "understood": "..."}` or `{"error": "..."}`.
Comparing is done without math-verify's own time limit: the parent kills this process when its own has passed. If the parent
is gone too, the alarm ends it, whatever C code it is stuck in.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

ALARM_MARGIN_S = 2.0
"""The parent's limit comes first; the alarm is for orphans."""


def main() -> None:
    memory_bytes_max = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    import math_verify  # after the limit, so that it counts

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
    except Exception as error:  # noqa: BLE001 - the one recording point of this process: the parent makes it an infra failure
        return {"error": f"{type(error).__name__}: {error}"}


def _parse(math_verify: Any, text: str) -> list[Any]:
    """What math-verify finds in `text`; bare algebra such as `x+1` is found only between dollar signs."""
    found = math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
    return found or math_verify.parse(f"${text}$", parsing_timeout=None, raise_on_error=True)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
