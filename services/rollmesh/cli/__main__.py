"""The `rollmesh` command.

Exit codes: 0 done; 1 a run or an audit failed; 2 bad input; 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

from rollmesh.cli.app import app
from rollmesh.cli.commands import (
    diagnosing,
    measuring,
    mending,
    observing,
    operating,
    proving,
    sampling,
    securing,
    training,
)

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = (training, operating, sampling, proving, mending, securing, observing, diagnosing, measuring)
"""In the order of `--help`; importing them registers them."""

_ORDER = [module.__name__ for module in COMMANDS]
app.registered_commands.sort(key=lambda command: _ORDER.index(getattr(command.callback, "__module__", "")))


def main() -> None:
    """The entry point of the package."""
    app(prog_name="rollmesh")


if __name__ == "__main__":
    main()
