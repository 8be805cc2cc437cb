"""Extras of a task: named JSON values beside its prompt, such as files, or a solution.

Public extras travel with the task: the ledger, the leases and every process of a run have them. Private ones stay at
the data service, which sends those of one task to a rollout worker for an agent that the configuration permits to read
them (docs/agents.md). A message has each value as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

EXTRA_NAME = r"^[A-Za-z0-9_.-]{1,64}\Z"
ExtraName = Annotated[str, Meta(pattern=EXTRA_NAME)]
_NAME = re.compile(EXTRA_NAME)
NAMES_MAX = 64
"""Maximum number of public, and of private extras of a task."""
PUBLIC_BYTES_MAX = 64 * 1024
"""Maximum size of the public extras of a task, bytes of JSON. The ledger stores them once per group."""
PRIVATE_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of the private extras of a task, bytes of JSON. One message has them."""


class ExtraError(ValueError):
    """An extra cannot be sent. The message does not contain its value."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"the extra {name!r} {what}")
        self.name = name
        self.what = what


def check_extras(extras: Mapping[str, object], bytes_max: int) -> None:
    """Raise ExtraError unless the extras have names, are JSON and have at most `bytes_max` bytes of it."""
    if not extras:
        return
    if not isinstance(extras, Mapping) or len(extras) > NAMES_MAX:
        raise ValueError(f"extras must be a mapping of at most {NAMES_MAX} names, got a {type(extras).__name__}")
    for name in extras:
        if not isinstance(name, str) or not is_extra_name(name):
            raise ExtraError(str(name)[:64], "must have a name of 1 to 64 letters, digits, `_`, `.` and `-`")
    num_bytes = 0
    for name, text in encode_extras(extras).items():
        num_bytes += len(text.encode())
        if num_bytes > bytes_max:
            raise ExtraError(name, f"has {num_bytes} bytes of JSON with those before it, more than {bytes_max}")


def is_extra_name(name: str) -> bool:
    """Return whether a text can be the name of an extra."""
    return _NAME.fullmatch(name) is not None


def encode_extras(extras: Mapping[str, object]) -> dict[str, str]:
    """Return each value as JSON. Raise ExtraError."""
    return {name: _json(name, value) for name, value in extras.items()}


def decode_extras(encoded: Mapping[str, str]) -> dict[str, object]:
    """Return the values. Raise ExtraError for one that is not JSON."""
    found: dict[str, object] = {}
    for name, text in encoded.items():
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):
            raise ExtraError(name, "is not JSON") from None
    return found


def _json(name: str, value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        kind = type(value).__name__
        raise ExtraError(name, f"must be a JSON value without NaN, of valid Unicode, got a {kind}") from None
    return text
