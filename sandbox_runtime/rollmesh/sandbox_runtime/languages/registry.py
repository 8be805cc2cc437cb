"""The languages of a host by name, and those of one session, created on first use."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping

from rollmesh.sandbox_runtime.interpreter import Interpreter
from rollmesh.sandbox_runtime.languages import port, sql
from rollmesh.sandbox_runtime.languages.bash import Bash
from rollmesh.sandbox_runtime.languages.port import ProgramRejected, Reply
from rollmesh.sandbox_runtime.languages.programs import COMMANDS, Command, CommandLanguage, JavaScript
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.output import Emit
from rollmesh.sandbox_runtime.program import PYTHON, Program

_TOOLS = {"bash": "/bin/bash", "javascript": "node"}
"""Language -> the program of the host that it needs."""
BUILT_IN = (PYTHON, *_TOOLS, *COMMANDS, *sql.MODULES)
"""Names of the languages that need no declaration."""


def present(path: str | None = None, declared: Mapping[str, Command] | None = None) -> tuple[str, ...]:
    """Return the languages whose programs exist on this host (or in this jail).

    `path` is searched instead of PATH. `declared` are languages of the operator besides those of `COMMANDS`.
    """
    tools = _TOOLS | {name: command.needs for name, command in {**COMMANDS, **(declared or {})}.items()}
    found = (name for name, tool in tools.items() if shutil.which(tool, path=path))
    return (PYTHON, *found, *(name for name in sql.MODULES if sql.is_here(name)))


class Languages:
    """The languages of one session."""

    def __init__(self, interpreter: Interpreter, limits: Limits) -> None:
        self._interpreter = interpreter
        self._limits = limits
        self._bash = Bash(limits)

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Names of the state that a snapshot cannot save."""
        return ("<bash>",) if self._bash.runs else ()

    def run(self, program: Program, wall_s: float, emit: Emit | None) -> Reply:
        """Run a program in its language. Raises ProgramRejected."""
        try:
            return self._run(program, wall_s, emit)
        except MemoryError:
            return port.failed("MemoryError", "out of memory", port.MEMORY)
        except OSError as error:
            exhausted = {errno.EAGAIN: port.PROCESSES, errno.ENOMEM: port.MEMORY}
            return port.failed(type(error).__name__, str(error), exhausted.get(error.errno or 0, port.ERROR))

    def _run(self, program: Program, wall_s: float, emit: Emit | None) -> Reply:
        if program.language == PYTHON:
            port.refuse_input(program)
            return self._interpreter.run(program.code, wall_s, emit)
        if program.language not in present():
            raise ProgramRejected(_not_here(program.language))
        if program.language == "bash":
            return self._bash.run(program, wall_s, emit)
        if program.language in sql.MODULES:
            return sql.Sql(program.language, self._limits).run(program, wall_s)
        if program.language == "javascript":
            return JavaScript(self._limits, emit).run(program, wall_s)
        return CommandLanguage(COMMANDS[program.language], self._limits, emit).run(program, wall_s)


def _not_here(language: str) -> str:
    library = sql.MODULES.get(language)
    missing = f": its profile lacks the library {library}; name it in library_paths and preload" if library else ""
    return f"language {language!r} is not available{missing}; this host has: {', '.join(present())}"
