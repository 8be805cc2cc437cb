"""The port of a language: the interface between a session and the code that runs its programs."""

from __future__ import annotations

from typing import Any, Protocol

from rollmesh.sandbox_runtime.program import Program

OK, ERROR, TIME, MEMORY, PROCESSES, OUTPUT = "ok", "error", "time", "memory", "processes", "output"
"""Outcomes of a program, as the service decodes them."""

Reply = dict[str, Any]
"""outcome, stdout, stderr, result, truncated, wall_s, cpu_s, exit_status, error_type, error_message, traceback; absent
means empty."""


class ProgramRejected(Exception):
    """This program cannot run here because of a mistake of the caller. Nothing ran."""


class Language(Protocol):
    """Runs programs of one language, under the limits of the session for which it was created."""

    def run(self, program: Program, wall_s: float) -> Reply:
        """Run a program to its end or for `wall_s`. Raises ProgramRejected, and OSError or MemoryError if a resource of
        the session is exhausted."""
        ...


def refuse_input(program: Program) -> None:
    """Reject input for a language that keeps state between commands. Raises ProgramRejected."""
    if program.stdin or program.arguments:
        raise ProgramRejected(
            f"{program.language} keeps its state between commands and does not accept stdin or arguments"
        )


def failed(error_type: str, message: str, outcome: str = ERROR) -> Reply:
    """Return the part of a reply that describes an error."""
    return {"outcome": outcome, "error_type": error_type, "error_message": message}
