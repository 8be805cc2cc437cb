"""`rollmesh merge`: one model folder of a checkpoint with low-rank adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import app, report_errors


@app.command()
def merge(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run, whose newest checkpoint is merged, or a checkpoint."),
    ],
    out: Annotated[Path, typer.Option("--out", help="New folder for the model.")],
    base: Annotated[
        Path | None, typer.Option(help="Folder of the base.", show_default="the folder from which the run began")
    ] = None,
) -> None:
    """Merge the adapters of a run with `learner.lora` into their base: one folder that plain transformers loads."""
    with report_errors():
        set_up_compute()
        from rollmesh.app.run_folder import RunFolder, shown
        from rollmesh.shared.errors import ConfigError
        from rollmesh.trainer.merge import merge_checkpoint

        checkpoint: Path | None = source.resolve()
        if (source / "checkpoints").is_dir():
            checkpoint = RunFolder(source.resolve()).newest_checkpoint()
        if checkpoint is None:
            raise ConfigError(
                f"{source} has no checkpoint yet; wait for the first one (`learner.checkpoint_every`)", path=source
            )
        merge_checkpoint(checkpoint, out.resolve(), base.resolve() if base is not None else None)
        typer.echo(f"{shown(checkpoint)} merged into {shown(out.resolve())}")
