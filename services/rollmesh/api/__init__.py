"""A whole run from Python: what `rollmesh train` does, in an event loop of the caller.

    summary = await train("mine.yaml", ["run.max_staleness=1"], out="runs/mine")
    print(summary.heldout_success_after, summary.checkpoint)

The run folder is the same as the command's: `rollmesh audit`, `show`, `status` and `train` read it.
Collaborators: `cli.open_run` (opens the folder), `cli.session` (runs it).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.cli.app import set_up_compute
from rollmesh.cli.display import QuietView, View
from rollmesh.cli.open_run import open_run
from rollmesh.cli.session import Session
from rollmesh.cli.summary import Summary

__all__ = ["Summary", "View", "train"]


async def train(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    in_process: bool = True,
    view: View | None = None,
) -> Summary:
    """Train by a configuration file, or continue the run in a folder; the summary of the run, which is in summary.json too.

    `out` is a new run's folder, by default runs/NAME-TIME. `in_process` runs every service in this event loop; False starts a process
    for each and must be called from the main thread. `view` observes the progress. In the main thread, Ctrl-C, SIGTERM and SIGHUP stop
    the run in good order with the outcome `interrupted`. Raises MeshError: ConfigError for bad input, and whatever stops the run.
    """
    set_up_compute()
    folder = Path(out) if out is not None else None
    async with AsyncExitStack() as stack:
        opening = open_run(Path(config), list(overrides), command=sys.argv, out=folder)
        run = await asyncio.to_thread(stack.enter_context, opening)  # its checks run event loops of their own
        session = Session(
            folder=run.folder,
            config=run.config,
            base_dir=run.base_dir,
            view=view or QuietView(),
            in_process=in_process,
        )
        return await session.run()
