"""`rollmesh recipes`: the built-in recipes."""

from __future__ import annotations

import typer

from rollmesh.cli.app import AsJson, app, report_errors


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the built-in recipes, with the rows of the method catalog that they cover.

    `recipe: NAME` in a configuration uses one. A file beside the configuration is named by its path, e.g. `recipe: mine.yaml`.
    """
    with report_errors():
        import json

        from rollmesh.trainer.recipe import find_recipe, read_recipe, recipe_names

        found = []
        for name in recipe_names():
            file = find_recipe(name)
            about, _ = read_recipe(file)
            fields = {field: getattr(about, field) for field in about.__struct_fields__}
            found.append({"name": name, **fields, "file": str(file)})
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "kind", "seeds", "status", "summary", box=None, pad_edge=False)
    for one in found:
        status = f"{one['status']}, without: {one['missing']}" if one["missing"] else one["status"]
        table.add_row(one["name"], one["kind"], " ".join(one["seeds"]), status, one["summary"])
    Console().print(table)
