"""`rollmesh train`, `demo` and `check`: from the command line to a session. Loaded by the sub-commands that need it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from rollmesh.cli.check import load_checked, notes
from rollmesh.cli.config import DEMO_CONFIG, TrainConfig
from rollmesh.cli.display import open_view
from rollmesh.cli.in_force import headline, in_force
from rollmesh.cli.resume import Resumption, open_resumption
from rollmesh.cli.run_folder import RunFolder, new_folder, origin_now
from rollmesh.cli.session import Session
from rollmesh.cli.summary import Summary
from rollmesh.mesh.run_lock import owned
from rollmesh.shared.config import to_yaml
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.telemetry import set_up_logging


def check_file(path: Path, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The configuration in force as YAML, and what is worth knowing about it. Raises InvalidInput with every mistake."""
    config, base_dir = load_checked(path, overrides), path.parent
    return to_yaml(in_force(config, base_dir)), [headline(config, base_dir), *notes(config, base_dir)]


def train(
    path: Path,
    overrides: Sequence[str],
    *,
    command: list[str],
    console: Console,
    out: Path | None = None,
    in_process: bool = False,
) -> Summary:
    """Trains by a configuration file, or goes on with the run in a folder, telling what changed. Raises MeshError.

    `in_process` puts all parts into this process, whatever `processes.enabled` says.
    """
    with opened(path, overrides, command=command, out=out) as run:
        _print(console, *run.notes)
        return _run(run.folder, run.config, run.base_dir, console, in_process=in_process)


@contextmanager
def opened(path: Path, overrides: Sequence[str], *, command: list[str], out: Path | None) -> Iterator[Resumption]:
    """A new run by a configuration file, or the run in a folder, with the lock of its folder. Raises MeshError."""
    if path.is_dir():
        if out is not None:
            raise ConfigError(
                f"--out {out} cannot be used with a run's folder, because a resumed run stays in it; remove --out"
            )
        RunFolder(path).read_origin()
        with owned(path.resolve()):  # before anything is read or written: another process may be running the run
            yield open_resumption(path, list(overrides))
        return
    config, base_dir = load_checked(path, overrides), path.parent.resolve()
    # Every mistake was found before anything is made: none leaves a folder behind.
    folder = new_folder(config, origin_now(command, base_dir), out)
    with owned(folder.root):
        yield Resumption(folder=folder, config=config, base_dir=base_dir, notes=())


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def demo(
    seed: int,
    overrides: Sequence[str],
    *,
    command: list[str],
    console: Console,
    out: Path | None,
    in_process: bool = False,
) -> Summary:
    """Trains the demo; otherwise as `train`."""
    overrides = [f"run.seed={seed}", *overrides]
    return train(DEMO_CONFIG, overrides, command=command, console=console, out=out, in_process=in_process)


def _run(folder: RunFolder, config: TrainConfig, base_dir: Path, console: Console, *, in_process: bool) -> Summary:
    _print(console, headline(config, base_dir), *notes(config, base_dir))
    with folder.log.open("a", encoding="utf-8") as log:
        set_up_logging(config.telemetry.logging(), stream=log)
        try:
            view = open_view(config, console, _shown(folder.root))
            try:
                session = Session(folder=folder, config=config, base_dir=base_dir, view=view, in_process=in_process)
                return asyncio.run(session.run())
            finally:
                view.close()
        finally:
            logging.shutdown()
            logging.getLogger().handlers.clear()


def _shown(path: Path) -> str:
    """Relative to where the person stands, if that is shorter."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
