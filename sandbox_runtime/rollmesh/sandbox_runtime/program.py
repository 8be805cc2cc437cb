"""A program for a session, as the service sends it to the jail. Standard library only, because the jail imports it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PYTHON = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One piece of source text in one language."""

    code: str
    language: str = PYTHON
    stdin: bytes = b""
    """Standard input; the stateful languages reject it."""
    arguments: Sequence[str] = ()
    """Command line of a compiled program."""
    return_paths: Sequence[str] = ()
    """Relative paths of files to return with the result, if they exist."""

    def as_message(self) -> dict[str, Any]:
        """Return plain values for a JSON frame."""
        return {
            "language": self.language,
            "code": self.code,
            "stdin": base64.b64encode(self.stdin).decode(),
            "arguments": list(self.arguments),
            "return_paths": list(self.return_paths),
        }


def from_message(message: Mapping[str, Any]) -> Program:
    """Decode `Program.as_message`. Trusts the sender, which is the service."""
    return Program(
        language=message["language"],
        code=message["code"],
        stdin=base64.b64decode(message["stdin"]),
        arguments=tuple(message["arguments"]),
        return_paths=tuple(message["return_paths"]),
    )
