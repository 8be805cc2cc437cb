"""`rollmesh query`: SQL over exported samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmesh.cli.app import app, report_errors

if TYPE_CHECKING:
    from rollmesh.app.lake.query import QueryResult

_ROWS_MAX = 200
_CELL_CHARS_MAX = 100


@app.command()
def query(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a folder of `rollmesh export --folder`.")],
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A statement over the views samples, rewards and updates.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Query exported samples with SQL. Run `rollmesh export` first. See docs/samples.md."""
    with report_errors():
        from rollmesh.app.lake.query import opened
        from rollmesh.shared.errors import ConfigError

        if as_json and as_csv:
            raise ConfigError("--json and --csv exclude each other; give one of them")
        with opened(run) as tables:
            result = tables.query(sql)
            if as_json:
                _print_json(result)
            elif as_csv:
                _print_csv(result)
            else:
                _print_table(result)


def _print_json(result: QueryResult) -> None:
    import msgspec

    from rollmesh.shared.errors import ConfigError

    if len(set(result.columns)) < len(result.columns):
        raise ConfigError(f"--json needs columns with different names, got {', '.join(result.columns)}; rename with AS")
    for row in result.rows:
        typer.echo(msgspec.json.encode(dict(zip(result.columns, row, strict=True))).decode())


def _print_csv(result: QueryResult) -> None:
    import csv
    import sys

    writer = csv.writer(sys.stdout)
    writer.writerow(result.columns)
    writer.writerows([_text(value) for value in row] for row in result.rows)


def _print_table(result: QueryResult) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(*map(escape, result.columns))
    omitted = False
    for number, row in enumerate(result.rows):
        if number == _ROWS_MAX:
            omitted = True
            break
        table.add_row(*(Text(_shortened(_text(value))) for value in row))
    Console().print(table)
    if omitted:
        typer.echo(f"the first {_ROWS_MAX} rows; --json and --csv print all")


def _text(value: Any) -> str:
    """Return a value as text: a list or an object as JSON."""
    import msgspec

    if value is None:
        return ""
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _CELL_CHARS_MAX else text[: _CELL_CHARS_MAX - 3] + "..."
