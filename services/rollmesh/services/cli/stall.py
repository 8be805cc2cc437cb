"""What a session does about a run that stands still: go on and show it, or end with the cause (`run.on_stall`)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from rollmesh.services.cli.watch import Recorder
from rollmesh.shared.errors import DeadlineExceeded


class RunStalled(DeadlineExceeded):
    """The run made no progress for `run.stall_s`, and its config says that this ends it."""

    reason = "RUN_STALLED"


async def unless_stalled(
    work: Coroutine[Any, Any, None], recorder: Recorder, on_stall: Literal["warn", "exit"]
) -> None:
    """Awaits `work`. Under `exit`, gives it up and raises RunStalled with the cause once the recorder sees a stall."""
    if on_stall == "warn":
        return await work
    working = asyncio.ensure_future(work)
    stalled = asyncio.ensure_future(recorder.stalled.wait())
    try:
        await asyncio.wait([working, stalled], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RunStalled(
                f"the run stands still, and run.on_stall is exit: {recorder.now.stalled}; mend that, then go on with its folder"
            )
        working.result()
    finally:
        for task in (working, stalled):
            task.cancel()
        await asyncio.gather(working, stalled, return_exceptions=True)
