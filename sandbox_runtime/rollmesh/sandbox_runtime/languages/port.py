"""The port of a language: what a session asks of whatever runs a program."""

from __future__ import annotations

from typing import Any, Protocol

from rollmesh.sandbox_runtime.program import Program

OK, ERROR, TIME, MEMORY, PROCESSES, OUTPUT = "ok", "error", "time", "memory", "processes", "output"
"""How a program ends, as the service reads it."""

Reply = dict[str, Any]
"""outcome, stdout, stderr, result, truncated, wall_s, cpu_s, exit_status, error_type, error_message, traceback; absent means empty."""


class ProgramRejected(Exception):
    """This program can't be run here: the asker's mistake, nothing ran."""


class Language(Protocol):
    """Runs programs of one language, under the limits of the session it was made for."""

    def run(self, program: Program, wall_s: float) -> Reply:
        """Run to its end or for `wall_s`. Raises Refused; OSError and MemoryError for what the session has run out of."""
        ...


def refuse_input(program: Program) -> None:
    """For the languages that keep state between commands. Raises Refused."""
    if program.stdin or program.arguments:
        raise ProgramRejected(
            f"{program.language} keeps its state between commands: it takes no stdin and no arguments"
        )


def failed(error_type: str, message: str, outcome: str = ERROR) -> Reply:
    """The part of a reply that says what went wrong."""
    return {"outcome": outcome, "error_type": error_type, "error_message": message}
