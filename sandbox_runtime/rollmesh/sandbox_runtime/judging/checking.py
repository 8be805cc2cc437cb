"""The oracle's side of a judgment by checker. Runs inside the oracle's jail, where no candidate's code ever is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def wrap(check: Callable[[Any, Any, Any], object]) -> Callable[[str], str]:
    """The operator's `check` as a function from JSON to JSON. Only True accepts: a value that happens to be truthy is a mistake."""

    def checked(text: str) -> str:
        given, expected, answer = json.loads(text)
        said = check(given, expected, answer)
        accept, message = said if isinstance(said, tuple) else (said, "")
        if not isinstance(accept, bool):
            raise TypeError(f"check must return a bool, or (bool, message), got {type(accept).__name__}")
        return json.dumps({"accept": accept, "message": str(message)})

    return checked
