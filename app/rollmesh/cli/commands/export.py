"""`rollmesh export`: every sample of a run, as files for other tools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import AsJson, app, console, print_json, report_errors

if TYPE_CHECKING:
    from rollmesh.app.lake.export import LakeExport


class ExportFormat(StrEnum):
    """What is written."""

    PARQUET = "parquet"
    SFT = "sft"
    ATIF = "atif"


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run or mesh, which may be running.")],
    kind: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="parquet: every sample with its lineage. sft: conversations. atif: agent trajectories of Harbor.",
        ),
    ] = ExportFormat.PARQUET,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the Parquet files.", show_default="RUN/samples")
    ] = None,
    where: Annotated[
        str,
        typer.Option(
            metavar="SQL",
            help="Condition of the samples for sft and atif, e.g. 'reward.correct >= 1'.",
            show_default="all",
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for sft or atif: JSON lines, or Parquet if it ends in .parquet.",
            show_default="FOLDER/NAME.FORMAT.jsonl",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--run-name", help="Name of the run, if the mesh served several.", show_default="the configured run"
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Export every sample of a run to Parquet files. A second call adds what has ended since. See docs/samples.md."""
    terminal = console(as_json)
    with report_errors():
        from rollmesh.app.lake.export import export_folder
        from rollmesh.shared.errors import ConfigError

        if kind is ExportFormat.PARQUET and (where or out):
            raise ConfigError(
                "--where and --out need --format sft or atif; the Parquet files have every sample, in --folder"
            )
        with terminal.status("reading the ledger") as status:
            result = export_folder(
                run, name=name, folder=folder, on_update=lambda update: status.update(f"writing update {update}")
            )
            if kind is not ExportFormat.PARQUET:
                status.update(f"writing conversations as {kind}")
                result = _write_conversations(kind, result, where, out)
    if as_json:
        print_json(result)
    else:
        typer.echo(_text(result))


def _write_conversations(kind: ExportFormat, result: LakeExport, where: str, out: Path | None) -> LakeExport:
    import msgspec

    from rollmesh.app.lake.conversations import write_atif, write_sft
    from rollmesh.app.lake.query import opened

    path = out or Path(result.folder) / f"{result.run}.{kind}.jsonl"
    with opened(Path(result.folder)) as tables:
        num = (write_sft if kind is ExportFormat.SFT else write_atif)(tables, path, where, result.run)
    return msgspec.structs.replace(result, out=str(path), num_written=num)


def _text(result: LakeExport) -> str:
    live = f"; {result.num_live} have not ended, or wait for a checkpoint" if result.num_live else ""
    lines = [
        f"samples      {result.num_rows}, of which {result.num_new} are new{live}",
        f"updates      {result.num_updates}",
        f"with tokens  {result.num_stored}",
        f"folder       {result.folder}   (rollmesh query)",
    ]
    if result.out:
        lines.append(f"written      {result.num_written} to {result.out}")
    if result.num_damaged:
        lines.append(f"{result.num_damaged} payloads are damaged; see `rollmesh audit --payloads`")
    return "\n".join(lines)
