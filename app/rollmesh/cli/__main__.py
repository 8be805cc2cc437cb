"""The `rollmesh` command."""

from __future__ import annotations

from rollmesh.cli.app import app
from rollmesh.cli.commands import (
    audit,
    backup,
    certs,
    check,
    clean,
    dead,
    delete,
    demo,
    doctor,
    drain,
    exchange,
    export,
    health,
    judge,
    merge,
    nats_config,
    page,
    query,
    recipes,
    rollout,
    scale,
    score,
    serve,
    sft,
    show,
    status,
    stop,
    trace,
    train,
    up,
    weights,
)
from rollmesh.shared.process.interpreter_tuning import collect_rarely

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = (
    demo, train, check, sft, recipes, up, serve, scale, drain, stop, delete, status, page, weights, health, dead,
    trace, rollout, show, export, query, score, judge, exchange,
    audit, backup, merge, clean, certs, nats_config, doctor,
)  # fmt: skip
"""In the order of `--help`; importing them registers them."""

_ORDER = [module.__name__ for module in COMMANDS]
app.registered_commands.sort(key=lambda command: _ORDER.index(getattr(command.callback, "__module__", "")))


def main() -> None:
    """The entry point of the package."""
    collect_rarely()
    app(prog_name="rollmesh")


if __name__ == "__main__":
    main()
