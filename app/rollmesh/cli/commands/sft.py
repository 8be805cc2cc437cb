"""`rollmesh sft`: fine-tune a model on conversations, as a warm start of reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.app.compute import set_up_compute
from rollmesh.cli.app import (
    INTERRUPTED,
    AsJson,
    Out,
    Overrides,
    app,
    console,
    print_json,
    report_errors,
)

if TYPE_CHECKING:
    from rich.console import Console

    from rollmesh.sft.config import SftConfig
    from rollmesh.sft.training import FineTuning, SftProgress, SftSummary


@app.command()
def sft(
    config: Annotated[Path, typer.Argument(help="A configuration file, or the folder of a fine-tuning to resume.")],
    overrides: Overrides = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model on your own conversations, for example before `rollmesh train`. See docs/sft.md."""
    from rollmesh.app.run_folder import claim_folder
    from rollmesh.mesh.run_lock import owned
    from rollmesh.shared.errors import ConfigError

    with report_errors():
        set_up_compute()
        settings = _settings(config, overrides or [])
        if config.is_dir() and out is not None:
            raise ConfigError(f"--out {out} cannot be used with the folder of a run, which stays in it; remove --out")
        folder = config.resolve() if config.is_dir() else claim_folder(settings.name, out)
        with owned(folder):
            summary = _fine_tune(settings, folder, console(as_json))
    if as_json:
        print_json(summary)
    else:
        typer.echo(_ending(summary, folder))
    raise typer.Exit(INTERRUPTED if summary.outcome == "interrupted" else 0)


def _settings(path: Path, overrides: Sequence[str]) -> SftConfig:
    """Return the configuration of a file, or the stored one of a folder, with absolute paths. Raises ConfigError."""
    from rollmesh.sft.config import SftConfig
    from rollmesh.shared.config.loader import load_config
    from rollmesh.shared.errors import ConfigError

    file = path / "config.yaml" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ConfigError(f"{path} is not the folder of a fine-tuning; name one that `rollmesh sft` created", path=path)
    return load_config(SftConfig, file, overrides).located(file.parent)


def _fine_tune(config: SftConfig, folder: Path, terminal: Console) -> SftSummary:
    """Run the session in a thread, so that Ctrl-C ends it after the update that is being made."""
    import asyncio

    from rollmesh.app.interrupts import Interrupts
    from rollmesh.app.run_folder import shown
    from rollmesh.sft.training import FineTuning
    from rollmesh.shared.config.loader import to_yaml

    def show(line: str) -> None:
        terminal.print(line, markup=False, highlight=False, soft_wrap=True)

    def work(stopping: asyncio.Event) -> SftSummary:
        show(f"reading {shown(Path(config.data))} and {shown(Path(config.model))}")
        with closing(FineTuning(config, folder)) as session:
            (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            for line in (_headline(session), *session.notes):
                show(line)
            return session.run(lambda progress: show(_line(progress)) if _worth(progress) else None, stopping.is_set)

    async def run() -> SftSummary:
        with Interrupts(notice=lambda: show("stopping: finishing the update, writing a checkpoint")) as interrupts:
            return await asyncio.to_thread(work, interrupts.stop)

    return asyncio.run(run())


def _headline(session: FineTuning) -> str:
    data, step = session.data, session.trainer.step
    trained = sum(c.num_trained for c in data.train)
    parts = [
        f"{len(data.train)} conversations with {trained} tokens to train on",
        f"{len(data.heldout)} held out",
        f"{len(session.batches)} updates",
        f"{data.num_dropped} conversations dropped: longer than the context" if data.num_dropped else "",
        f"resuming after update {step}" if step else "",
    ]
    return ", ".join(part for part in parts if part)


def _worth(progress: SftProgress) -> bool:
    """Whether an update gets a line: about 100 per run, and each with a measurement."""
    step = max(1, progress.updates // 100)
    return progress.update % step == 0 or progress.heldout_loss is not None


def _line(progress: SftProgress) -> str:
    measured = "" if progress.heldout_loss is None else f"   held-out loss {progress.heldout_loss:.4f}"
    return (
        f"update {progress.update} of {progress.updates}   epoch {progress.epoch:.2f}   loss {progress.loss:.4f}   "
        f"{progress.tokens_per_s:.0f} tokens/s{measured}"
    )


def _ending(summary: SftSummary, folder: Path) -> str:
    from rollmesh.app.run_folder import shown

    lines = [f"{summary.name}: {summary.outcome} after {summary.updates} updates, {summary.wall_s:.0f} s"]
    if summary.heldout_loss is not None:
        lines[0] += f"; held-out loss {summary.heldout_loss_before:.4f} -> {summary.heldout_loss:.4f}"
    if summary.outcome == "finished":
        lines.append(f"  model       {shown(Path(summary.model))}   (`model` of a configuration for `rollmesh train`)")
    else:
        lines.append(f"  resume      rollmesh sft {shown(folder)}")
    lines.append(f"  checkpoint  {shown(Path(summary.checkpoint))}")
    return "\n".join(lines)
