"""Run all computation in one thread, so that the event loop continues to renew leases.

A single thread also makes the trainer's calls sequential: the computation of a cancelled caller finishes before the
next call begins. A computation cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rollmesh.shared.store.disk import disk_full_errors

T = TypeVar("T")
_log = logging.getLogger(__name__)


class ComputeThread:
    """A compute thread, open until `close`."""

    def __init__(self, folder: Path = Path(), name: str = "learner-compute") -> None:
        """`folder` is the folder that the work writes to. The error of a full disk names it."""
        self._folder = folder
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work()`. Raise DiskFull for a full disk. If the caller is cancelled, started work
        continues."""
        with disk_full_errors(self._folder):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def close(self, limit_s: float) -> None:
        """Wait for the running work, at most `limit_s`, and drop work that has not started."""
        ending = asyncio.create_task(asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True))
        done, _ = await asyncio.wait([ending], timeout=limit_s)
        if not done:
            _log.warning("the computation did not finish after the stop of the learner: limit_s=%s", limit_s)
