"""`rollmesh recipes`: the built-in recipes."""

from __future__ import annotations

import typer

from rollmesh.cli.app import AsJson, app, report_errors


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the built-in recipes. --json adds the paper, the formula, the missing part and the test of each.

    `recipe: NAME` in a configuration uses one. A file beside the configuration is named by its path, e.g. `recipe: mine.yaml`.
    """
    with report_errors():
        import json

        import msgspec

        from rollmesh.trainer.recipe import find_recipe, read_recipe, recipe_names

        found = []
        for name in recipe_names():
            file = find_recipe(name)
            about, _ = read_recipe(file)
            found.append({"name": name, **msgspec.to_builtins(about), "file": str(file)})
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "status", "summary", box=None, pad_edge=False)
    for one in found:
        table.add_row(one["name"], one["status"], one["summary"])
    Console().print(table)
