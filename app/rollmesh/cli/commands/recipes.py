"""`rollmesh recipes`: the catalog of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import AsJson, app, report_errors

if TYPE_CHECKING:
    from rollmesh.app.recipe_catalog import Method

COLUMNS_MAX = 120


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this recipe whole: a built-in, or your own file.yaml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the built-in recipes, or print one whole. --json adds the paper, the formula, the needs and the test of
    each.

    `recipe: NAME` in a configuration uses one. A file beside the configuration is named by its path, e.g. `recipe:
    mine.yaml`.
    """
    with report_errors():
        if name is None and not as_json:
            _print_table()
            return
        set_up_compute()
        import json

        from rollmesh.app.recipe_catalog import load_method
        from rollmesh.trainer.recipe import recipe_names

        if name is None:
            typer.echo(json.dumps([load_method(one).as_json() for one in recipe_names()], indent=2))
            return
        method = load_method(name)
        if as_json:
            more = {"changed": method.changed, "yaml": method.file.read_text(encoding="utf-8")}
            typer.echo(json.dumps(method.as_json() | more, indent=2))
        else:
            _print_whole(method)


def _print_table() -> None:
    """Print all recipes, those of a kind together. Loads no torch."""
    from rich.console import Console
    from rich.table import Table

    from rollmesh.trainer.recipe import find_recipe, read_recipe, recipe_names

    abouts = [(name, read_recipe(find_recipe(name))[0]) for name in recipe_names()]
    table = Table("kind", "name", "status", "summary", box=None, pad_edge=False)
    for row in sorted((about.kind, name, about.status, about.summary) for name, about in abouts):
        table.add_row(*row)
    Console(width=_columns()).print(table)


def _print_whole(method: Method) -> None:
    import textwrap

    from rollmesh.shared.config.loader import to_yaml

    about = method.about
    facts = {
        "paper": about.paper,
        "formula": about.formula,
        "needs": "; ".join(method.needs.phrases()),
        "assumes": about.assumes,
        "deviations": about.deviations,
        "missing": about.missing,
        "test": about.test,
        "file": str(method.file),
    }
    lines = [f"{method.name} ({', '.join(filter(None, (about.kind, about.status)))})"]
    lines += textwrap.wrap(about.summary, _columns()) + [""]
    for title, text in facts.items():
        first, rest = f"{title:12}", " " * 12
        lines += textwrap.wrap(text, _columns(), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    changed = to_yaml(method.changed) if method.changed else "none, its settings are the defaults\n"
    lines += ["", "settings that differ from the defaults:", textwrap.indent(changed, "  ")]
    typer.echo("\n".join([*lines, f"{method.file}:", method.file.read_text(encoding="utf-8")]), nl=False)


def _columns() -> int:
    """Return the width of the terminal, at most `COLUMNS_MAX`, and `COLUMNS_MAX` if the output is not a terminal."""
    import shutil

    return min(shutil.get_terminal_size((COLUMNS_MAX, 0)).columns, COLUMNS_MAX)
