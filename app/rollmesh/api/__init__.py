"""Train from Python: `rollmesh train` as a coroutine.

    summary = await train("mine.yaml", ["run.max_staleness=1"], out="runs/mine")
    print(summary.heldout_success_after, summary.checkpoint)

The run folder is that of the command: `rollmesh audit`, `show`, `status` and `train` read it.
Collaborators: `app.open_run` (opens the folder), `app.session` (runs it).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.app.compute import set_up_compute
from rollmesh.app.open_run import open_run
from rollmesh.app.session import TrainSession
from rollmesh.app.views.display import QuietView, View
from rollmesh.app.views.summary import Summary

__all__ = ["Summary", "View", "train"]


async def train(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    in_process: bool = True,
    view: View | None = None,
) -> Summary:
    """Train with a configuration file, or resume the run in a folder. Return the summary of the run, which summary.json
    also holds.

    `out` is the folder of a new run. Default: runs/NAME-TIME. `in_process` runs every service in this event loop. False
    starts a process for each service, and the call must be made in the main thread. `view` receives the progress. In
    the main thread, Ctrl-C, SIGTERM and SIGHUP stop the run cleanly with the outcome `interrupted`. Raises MeshError:
    ConfigError for invalid input, or the cause of a failure.
    """
    set_up_compute()
    folder = Path(out) if out is not None else None
    async with AsyncExitStack() as stack:
        opening = open_run(Path(config), list(overrides), command=sys.argv, out=folder)
        run = await asyncio.to_thread(stack.enter_context, opening)  # its checks run separate event loops
        session = TrainSession(
            folder=run.folder,
            config=run.config,
            base_dir=run.base_dir,
            view=view or QuietView(),
            in_process=in_process,
        )
        return await session.run()
