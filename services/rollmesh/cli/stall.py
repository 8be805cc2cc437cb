"""What a session does about a run that gets nowhere: show it and continue, or end with the cause (`run.on_stall`, `run.first_failures_max`)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from rollmesh.cli.watch import Recorder
from rollmesh.shared.errors import DeadlineExceeded


class RunStalled(DeadlineExceeded):
    """The run made no progress for `run.stall_s`, and its config says that this ends it."""

    reason = "RUN_STALLED"


async def unless_hopeless(
    work: Coroutine[Any, Any, None], recorder: Recorder, on_stall: Literal["warn", "exit"]
) -> None:
    """Awaits `work`. Cancels it and raises the cause once the recorder sees that all samples fail, or under `exit` a stall."""
    working = asyncio.ensure_future(work)
    hopeless = asyncio.ensure_future(recorder.hopeless.wait())
    stalled = asyncio.ensure_future(recorder.stalled.wait())
    ends = [working, hopeless, *([stalled] if on_stall == "exit" else [])]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if recorder.failure is not None and not working.done():
            raise recorder.failure
        if not working.done():
            raise RunStalled(
                f"the run is stalled, and run.on_stall is exit: {recorder.now.stalled}; remove the cause, then continue with "
                "its folder"
            )
        working.result()
    finally:
        for task in (working, hopeless, stalled):
            task.cancel()
        await asyncio.gather(working, hopeless, stalled, return_exceptions=True)
