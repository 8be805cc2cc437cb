"""What a session is asked to run, as it travels from the service to the jail. Standard library only: the jail reads it."""

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
    """Standard input; the stateful languages take none."""
    arguments: Sequence[str] = ()
    """Command line of a compiled program."""
    return_paths: Sequence[str] = ()
    """Relative paths of files to send back with the result, those that exist."""

    def as_message(self) -> dict[str, Any]:
        """Plain values, for a JSON frame."""
        return {
            "language": self.language,
            "code": self.code,
            "stdin": base64.b64encode(self.stdin).decode(),
            "arguments": list(self.arguments),
            "return_paths": list(self.return_paths),
        }


def from_message(message: Mapping[str, Any]) -> Program:
    """The inverse of `as_message`; trusts its sender, the service."""
    return Program(
        language=message["language"],
        code=message["code"],
        stdin=base64.b64decode(message["stdin"]),
        arguments=tuple(message["arguments"]),
        return_paths=tuple(message["return_paths"]),
    )
