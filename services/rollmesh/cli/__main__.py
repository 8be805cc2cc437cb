"""The `rollmesh` command."""

from __future__ import annotations

from rollmesh.cli.app import app
from rollmesh.cli.commands import (
    audit,
    bench,
    certs,
    check,
    clean,
    dead,
    delete,
    demo,
    doctor,
    drain,
    health,
    judge,
    recipes,
    rollout,
    score,
    serve,
    show,
    status,
    stop,
    trace,
    train,
    up,
    weights,
)

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = (
    demo, train, check, recipes, up, serve, drain, stop, delete, status, weights, health, rollout, show, score, audit, judge, clean, certs,
    trace, doctor, bench, dead,
)  # fmt: skip
"""In the order of `--help`; importing them registers them."""

_ORDER = [module.__name__ for module in COMMANDS]
app.registered_commands.sort(key=lambda command: _ORDER.index(getattr(command.callback, "__module__", "")))


def main() -> None:
    """The entry point of the package."""
    app(prog_name="rollmesh")


if __name__ == "__main__":
    main()
