"""The oracle's side of a judgment by checker. Runs inside the oracle's jail, which never contains code of the
candidate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def wrap(check: Callable[[Any, Any, Any], object]) -> Callable[[str], str]:
    """Wrap the operator's `check` as a function from JSON to JSON. Only True accepts; another truthy value is an
    error."""

    def checked(text: str) -> str:
        given, expected, answer = json.loads(text)
        decision = check(given, expected, answer)
        accept, message = decision if isinstance(decision, tuple) else (decision, "")
        if not isinstance(accept, bool):
            raise TypeError(f"check must return a bool, or (bool, message), got {type(accept).__name__}")
        return json.dumps({"accept": accept, "message": str(message)})

    return checked
